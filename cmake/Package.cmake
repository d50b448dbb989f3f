# Target `tarball`: one archive that runs wherever there is a C library of 2.34 or later, with nothing
# installed. What the programs need beyond the C library lies in lib/penstock/private, which they find
# by $ORIGIN. Left out on purpose:
#
#   libibverbs, librdmacm   opened at run time, and only the machine's own know its adapters
#   NVIDIA's libraries      the samples hold the static CUDA runtime, which may be passed on; no other
#                           part of the toolkit goes in
#
# Each program and library has its C++ library inside: a program never sees a second one, and Debian's
# asks for a newer C library than we do.
set(private_folder lib/penstock/private)
foreach(program penstock penstockd penstock-perf)
  target_link_libraries(${program} PRIVATE penstock_old_glibc)
  target_link_options(${program} PRIVATE -static-libstdc++ -static-libgcc)
endforeach()
set_target_properties(penstock penstockd penstock-perf PROPERTIES
  INSTALL_RPATH "$ORIGIN/../${private_folder}")
install(TARGETS penstock penstockd penstock-perf
  RUNTIME_DEPENDENCY_SET programs
  RUNTIME DESTINATION bin)
install(RUNTIME_DEPENDENCY_SET programs
  PRE_EXCLUDE_REGEXES "^lib(c|m|dl|pthread|rt|util|resolv|anl)\\.so" "^ld-linux"
  POST_EXCLUDE_REGEXES "^/lib.*/lib(c|m)\\.so" "ld-linux"
  LIBRARY DESTINATION ${private_folder})
install(TARGETS penstock_libcuda LIBRARY DESTINATION lib/penstock)
install(TARGETS simgpu_cuda LIBRARY DESTINATION lib/penstock/simgpu)
foreach(variant static per_thread rdc ptx_only)  # `shared` needs a toolkit beside it
  install(DIRECTORY ${CMAKE_BINARY_DIR}/bin/samples/${variant} DESTINATION samples
          USE_SOURCE_PERMISSIONS)
endforeach()
# Of whatever is inside our programs or lies beside them.
foreach(package libseccomp2 libstdc++6 libcapnp-dev libsodium-dev libtomlplusplus-dev libcli11-dev
                nlohmann-json3-dev libexpected-dev libzstd-dev liblz4-dev)
  string(REGEX REPLACE "(2|6|-dev|3-dev)$" "" name ${package})
  install(FILES /usr/share/doc/${package}/copyright DESTINATION licenses RENAME ${name})
endforeach()
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION .)
install(FILES ${CMAKE_SOURCE_DIR}/docs/tarball.md DESTINATION . RENAME README.md)

set(CPACK_GENERATOR TGZ)
set(CPACK_PACKAGE_FILE_NAME penstock-${PROJECT_VERSION}-linux-x86_64)
set(CPACK_STRIP_FILES ON)
set(CPACK_THREADS 0)
set(CPACK_OUTPUT_FILE_PREFIX ${CMAKE_BINARY_DIR})
include(CPack)
add_custom_target(tarball
  COMMAND ${CMAKE_CPACK_COMMAND} --config ${CMAKE_BINARY_DIR}/CPackConfig.cmake
  DEPENDS penstock penstockd penstock-perf penstock_libcuda simgpu_cuda samples_all
  COMMENT "${CPACK_PACKAGE_FILE_NAME}.tar.gz"
  VERBATIM)
