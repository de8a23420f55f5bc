# tenon_embed(TARGET OUT_CPP FILE...) gives TARGET a source holding the text of each FILE as
# tenon::cuda::kNameSkeleton (row_norm.cuh: kRowNormSkeleton), rewritten when a FILE changes.

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  # At build time: cmake -P embed.cmake OUT_CPP FILE...
  set(cpp "namespace tenon::cuda {\n")
  math(EXPR last "${CMAKE_ARGC} - 1")
  foreach(i RANGE 4 ${last})
    set(file "${CMAKE_ARGV${i}}")
    file(READ "${file}" text)
    string(FIND "${text}" ")tenon\"" clash)
    if(NOT clash EQUAL -1)
      message(FATAL_ERROR "${file} holds )tenon\", which ends the raw string it is put into")
    endif()

    get_filename_component(stem "${file}" NAME_WE)
    string(REGEX MATCHALL "[A-Za-z0-9]+" words "${stem}")
    set(name k)
    foreach(word IN LISTS words)
      string(SUBSTRING "${word}" 0 1 first)
      string(SUBSTRING "${word}" 1 -1 rest)
      string(TOUPPER "${first}" first)
      string(APPEND name "${first}${rest}")
    endforeach()
    string(APPEND name Skeleton)

    string(APPEND cpp "\nextern const char ${name}[];\n"
                      "const char ${name}[] = R\"tenon(${text})tenon\";\n")
  endforeach()
  string(APPEND cpp "\n}  // namespace tenon::cuda\n")
  file(WRITE "${CMAKE_ARGV3}" "${cpp}")
  return()
endif()

set(TENON_EMBED_SCRIPT "${CMAKE_CURRENT_LIST_FILE}")

function(tenon_embed target out_cpp)
  cmake_path(ABSOLUTE_PATH out_cpp BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
  set(files)
  foreach(file IN LISTS ARGN)
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
    list(APPEND files "${file}")
  endforeach()
  if(NOT files)
    message(FATAL_ERROR "tenon_embed(${target}): no file to embed")
  endif()
  add_custom_command(
    OUTPUT "${out_cpp}"
    COMMAND "${CMAKE_COMMAND}" -P "${TENON_EMBED_SCRIPT}" "${out_cpp}" ${files}
    DEPENDS "${TENON_EMBED_SCRIPT}" ${files}
    VERBATIM)
  target_sources("${target}" PRIVATE "${out_cpp}")
endfunction()
