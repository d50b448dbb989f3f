// What to do about a verbs call that failed for want of memory: nearly always it is the limit of
// locked memory that is too small, not the memory.
#pragma once

#include <string>

namespace penstock::transport::rdma {

// A sentence to append, with a space before it; empty if the error has nothing to do with the limit
// or there is none.
std::string MemlockAdvice(int error);

}  // namespace penstock::transport::rdma
