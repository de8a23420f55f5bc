# tenon_asmjit(TARGET): adds asmjit to the objects of a library, if it is installed. Sets
# TENON_ASMJIT_OBJECT to the object file, which programs that link the objects get by themselves. With
# sanitizers they link one library instead, which has it.
#
# Debian's archive can be part of a shared library but for one reference to `stderr`, which needs
# code that is not position-independent. It gets another name (src/backend/cpu/jit/binary.cpp).
function(tenon_asmjit target)
  find_package(asmjit CONFIG QUIET)
  if(NOT asmjit_FOUND OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    message(STATUS "tenon: no JIT on the CPU, because asmjit (libasmjit-dev) was not found; formulas run several times slower")
    return()
  endif()
  set(object ${PROJECT_BINARY_DIR}/asmjit.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_LINKER} -r -o ${object} --whole-archive $<TARGET_FILE:asmjit::asmjit>
    COMMAND ${CMAKE_OBJCOPY} --redefine-sym stderr=tenon_asmjit_stderr ${object}
    DEPENDS asmjit::asmjit VERBATIM)
  set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/backend/cpu/jit/*.cpp)
  target_sources(${target} PRIVATE ${sources})
  if(NOT TENON_SANITIZE)
    target_link_libraries(${target} INTERFACE $<BUILD_INTERFACE:${object}>)
  endif()
  add_custom_target(${target}_asmjit DEPENDS ${object})
  add_dependencies(${target} ${target}_asmjit)
  set_property(SOURCE ${sources} APPEND PROPERTY COMPILE_DEFINITIONS ASMJIT_STATIC)
  set_property(SOURCE ${PROJECT_SOURCE_DIR}/src/backend/cpu/tile_runner.cpp
    APPEND PROPERTY COMPILE_DEFINITIONS TENON_JIT)
  set(TENON_ASMJIT_OBJECT ${object} PARENT_SCOPE)
endfunction()
