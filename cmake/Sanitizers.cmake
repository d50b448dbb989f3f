# PENSTOCK_SANITIZER: empty, "address" (with undefined) or "thread". Only the libraries and the unit,
# protocol and transport tests are built then: a preloaded libcuda.so.1 cannot carry a sanitizer.
set(PENSTOCK_SANITIZER "" CACHE STRING "address, thread or empty")
if(PENSTOCK_SANITIZER STREQUAL "address")
  # g++ 12 sees uninitialized members in its own <regex> and <functional> once they are instrumented.
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
                      $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  add_link_options(-fsanitize=address,undefined)
elseif(PENSTOCK_SANITIZER STREQUAL "thread")
  # ThreadSanitizer does not model fences, and g++ says so as a warning; a fence it does not see can
  # only make it report a race that is none.
  add_compile_options(-fsanitize=thread -Wno-tsan)
  add_link_options(-fsanitize=thread)
elseif(PENSTOCK_SANITIZER)
  message(FATAL_ERROR "PENSTOCK_SANITIZER (${PENSTOCK_SANITIZER}) is none of: address, thread.")
endif()

# PENSTOCK_FUZZ: instruments everything for libFuzzer; needs clang. See tests/fuzz. What g++ accepts
# without a word is clang's to warn of, but no reason not to fuzz.
option(PENSTOCK_FUZZ "Build the fuzzers with libFuzzer (clang only)" OFF)
if(PENSTOCK_FUZZ)
  # CUDA's enums are C's: any int may stand in one (a newer driver's CUresult).
  add_compile_options(-fsanitize=fuzzer-no-link -Wno-error -fno-sanitize=enum)
endif()
