# penstock_codegen: the generated files, all in one folder of the build tree (PENSTOCK_GENERATED).
# Link it to include them ("functions.gen.h"); it also has cuda.h declare every generation of every
# function under its exported name. penstock_generated_sources(<variable> <regex>) lists outputs.
#
# The generator touches only outputs whose text changed, and ninja looks again after it ran, so a
# new row compiles only what mentions it.
set(PENSTOCK_PYTHON /usr/bin/python3 CACHE INTERNAL "Debian's, for its libclang and Jinja2")
set(PENSTOCK_GENERATED ${CMAKE_BINARY_DIR}/generated CACHE INTERNAL "")

function(penstock_generate)
  set(tool ${CMAKE_SOURCE_DIR}/codegen/generate.py)
  file(GLOB inputs CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/codegen/*.py
       ${CMAKE_SOURCE_DIR}/codegen/spec/cuda/*.toml ${CMAKE_SOURCE_DIR}/codegen/templates/*.j2)
  execute_process(COMMAND ${PENSTOCK_PYTHON} -B ${tool} --list OUTPUT_VARIABLE outputs
                  RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(FATAL_ERROR "codegen/generate.py refuses the spec.")
  endif()
  string(REPLACE "\n" ";" outputs "${outputs}")
  list(TRANSFORM outputs PREPEND ${PENSTOCK_GENERATED}/)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${tool})
  set_property(GLOBAL PROPERTY PENSTOCK_GENERATED_FILES "${outputs}")
  set(stamp ${PENSTOCK_GENERATED}/codegen.stamp)
  add_custom_command(
    OUTPUT ${stamp} BYPRODUCTS ${outputs}
    COMMAND ${PENSTOCK_PYTHON} -B ${tool} --out ${PENSTOCK_GENERATED}
    COMMAND ${CMAKE_COMMAND} -E touch ${stamp}
    DEPENDS ${inputs} COMMENT "Generating from codegen/spec")
  add_custom_target(penstock_codegen_run DEPENDS ${stamp})
  add_library(penstock_codegen INTERFACE)
  target_include_directories(penstock_codegen INTERFACE ${PENSTOCK_GENERATED})
  target_compile_definitions(penstock_codegen INTERFACE __CUDA_API_VERSION_INTERNAL)
  target_link_libraries(penstock_codegen INTERFACE penstock_cuda_headers)
  add_dependencies(penstock_codegen penstock_codegen_run)
endfunction()

function(penstock_generated_sources variable pattern)
  get_property(outputs GLOBAL PROPERTY PENSTOCK_GENERATED_FILES)
  list(FILTER outputs INCLUDE REGEX "/generated/${pattern}$")
  # The GENERATED mark is per folder; the caller's needs it too.
  set_source_files_properties(${outputs} PROPERTIES GENERATED TRUE)
  set(${variable} ${outputs} PARENT_SCOPE)
endfunction()
