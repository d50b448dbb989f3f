// Where the other products of this installation lie, seen from the running `penstock`:
// PREFIX/bin/penstock, PREFIX/bin/penstockd, PREFIX/lib/penstock/libcuda.so.1. The build tree has
// the same shape, so nothing needs to be installed.
#pragma once

#include <string>

#include "common/result.h"

namespace penstock {

struct Layout {
  std::string library_folder;  // PREFIX/lib/penstock
  std::string interposer;      // PREFIX/lib/penstock/libcuda.so.1
  std::string daemon;          // PREFIX/bin/penstockd
};

Result<Layout> FindLayout();

}  // namespace penstock
