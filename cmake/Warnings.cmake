# Warnings are errors in our own code. Third-party headers are included as SYSTEM.
add_compile_options(-Wall -Wextra -Werror -Wno-missing-field-initializers -fno-strict-aliasing)
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>)
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(CMAKE_C_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1")
