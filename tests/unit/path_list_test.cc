#include "tools/penstock/path_list.h"

#include <catch2/catch.hpp>

using penstock::WithEntryFirst;
using penstock::WithoutEntry;

TEST_CASE("an entry is put first, once", "[unit][tools]") {
  CHECK(WithEntryFirst("", "/p/libcuda.so.1") == "/p/libcuda.so.1");
  CHECK(WithEntryFirst("/a.so", "/p/libcuda.so.1") == "/p/libcuda.so.1:/a.so");
  CHECK(WithEntryFirst("/a.so:/p/libcuda.so.1:/b.so", "/p/libcuda.so.1") ==
        "/p/libcuda.so.1:/a.so:/b.so");
}

TEST_CASE("an entry is taken out wherever it stands, and nothing else is", "[unit][tools]") {
  CHECK(WithoutEntry("/x", "/x").empty());
  CHECK(WithoutEntry("/x:/y:/x /z", "/x") == "/y:/z");
  CHECK(WithoutEntry("/xy:/x/", "/x") == "/xy:/x/");
}
