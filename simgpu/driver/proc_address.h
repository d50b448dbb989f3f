// The exported functions by name and version, as exports.py reads them from cudaTypedefs.h.
#pragma once

namespace simgpu {

struct Procedure {
  const char* base;  // the name without suffixes, as cuGetProcAddress is asked for it
  int version;       // from which CUDA version on the program may get it
  bool per_thread;   // a _ptds or _ptsz twin
  const void* address;
};

// Sorted by base, then by version.
extern const Procedure kProcedures[];
extern const int kProcedureCount;

}  // namespace simgpu
