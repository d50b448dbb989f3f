// Context-local storage: values that a library keeps per CUDA context, under a key of its own.
//
// Each copy of the CUDA runtime in a process (its own, cuBLAS's, cuDNN's ...) stores one value per
// context and looks it up at the start of nearly every API call, so Get is the hottest function of
// any libcuda.so.1. It is answered from a small per-thread cache; a shared lock is taken only on a
// miss. A generation counter, bumped by every change, empties all caches at once.
#pragma once

#include <cuda.h>

namespace penstock::interop {

using StorageDestructor = void (*)(CUcontext context, void* key, void* value);

// A second Put under one (context, key) replaces the value without calling its destructor.
CUresult StoragePut(CUcontext context, void* key, void* value, StorageDestructor destructor);
// Removes the value without calling its destructor. CUDA_ERROR_INVALID_HANDLE if there is none.
CUresult StorageDelete(CUcontext context, void* key);
CUresult StorageGet(CUcontext context, void* key, void** value);
// The context goes: calls the destructors of its values and removes them. The destructors run
// without the lock held, so they may call back into this file.
void StorageDropContext(CUcontext context);

}  // namespace penstock::interop
