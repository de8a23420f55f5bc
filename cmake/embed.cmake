# tenon_embed(TARGET OUT_CPP NAMESPACE ns SUFFIX suffix FILE...) adds a source to TARGET with the
# text of each FILE as ns::kNameSuffix. Example: row_norm.cuh with Skeleton is kRowNormSkeleton. The
# source is written again when a FILE changes.

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  # At build time: cmake -P embed.cmake OUT_CPP NAMESPACE SUFFIX FILE...
  set(cpp "namespace ${CMAKE_ARGV4} {\n")
  math(EXPR last "${CMAKE_ARGC} - 1")
  foreach(i RANGE 6 ${last})
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
    string(APPEND name ${CMAKE_ARGV5})

    string(APPEND cpp "\nextern const char ${name}[];\n"
                      "const char ${name}[] = R\"tenon(${text})tenon\";\n")
  endforeach()
  string(APPEND cpp "\n}  // namespace ${CMAKE_ARGV4}\n")
  file(WRITE "${CMAKE_ARGV3}" "${cpp}")
  return()
endif()

set(TENON_EMBED_SCRIPT "${CMAKE_CURRENT_LIST_FILE}")

function(tenon_embed target out_cpp)
  cmake_parse_arguments(PARSE_ARGV 2 embed "" "NAMESPACE;SUFFIX" "")
  cmake_path(ABSOLUTE_PATH out_cpp BASE_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}")
  set(files)
  foreach(file IN LISTS embed_UNPARSED_ARGUMENTS)
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}")
    list(APPEND files "${file}")
  endforeach()
  if(NOT files)
    message(FATAL_ERROR "tenon_embed(${target}): no file to embed")
  endif()
  add_custom_command(
    OUTPUT "${out_cpp}"
    COMMAND "${CMAKE_COMMAND}" -P "${TENON_EMBED_SCRIPT}" "${out_cpp}"
            ${embed_NAMESPACE} ${embed_SUFFIX} ${files}
    DEPENDS "${TENON_EMBED_SCRIPT}" ${files}
    VERBATIM)
  target_sources("${target}" PRIVATE "${out_cpp}")
endfunction()
