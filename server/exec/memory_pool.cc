// Attributes of memory pools: numbers of 32 or 64 bits, by attribute.
#include "custom_server.gen.h"
#include "server/worker/worker.h"

namespace penstock::server {
namespace {

// The driver reads and writes an int for these, a 64-bit number for the others.
bool IsInteger(uint32_t attribute) {
  return attribute == CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES ||
         attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC ||
         attribute == CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
}
bool IsNumber(uint32_t attribute) {
  return attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ||
         attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ||
         attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH ||
         attribute == CU_MEMPOOL_ATTR_USED_MEM_CURRENT ||
         attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH;
}

}  // namespace

CUresult ServeCuMemPoolSetAttribute(CallContext& call,
                                    const commands::CuMemPoolSetAttribute& command, Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemPoolSetAttribute is followed by something.");
  CUmemoryPool pool;
  if (!call.MemoryPool(command.pool, &pool)) return call.error();
  const auto attribute = static_cast<CUmemPool_attribute>(command.attribute);
  if (IsInteger(command.attribute)) {
    int value = static_cast<int>(command.value);
    return call.driver().cuMemPoolSetAttribute(pool, attribute, &value);
  }
  if (!IsNumber(command.attribute)) return CUDA_ERROR_INVALID_VALUE;
  cuuint64_t value = command.value;
  return call.driver().cuMemPoolSetAttribute(pool, attribute, &value);
}

CUresult ServeCuMemPoolGetAttribute(CallContext& call,
                                    const commands::CuMemPoolGetAttribute& command, Reader& rest) {
  if (!rest.AtEnd()) return call.Malformed("cuMemPoolGetAttribute is followed by something.");
  CUmemoryPool pool;
  if (!call.MemoryPool(command.pool, &pool)) return call.error();
  const auto attribute = static_cast<CUmemPool_attribute>(command.attribute);
  commands::CuMemPoolGetAttributeReply reply{};
  CUresult result = CUDA_ERROR_INVALID_VALUE;
  if (IsInteger(command.attribute)) {
    int value = 0;
    result = call.driver().cuMemPoolGetAttribute(pool, attribute, &value);
    reply.value = static_cast<uint64_t>(value);
  } else if (IsNumber(command.attribute)) {
    cuuint64_t value = 0;
    result = call.driver().cuMemPoolGetAttribute(pool, attribute, &value);
    reply.value = value;
  }
  if (result == CUDA_SUCCESS) call.reply().Put(reply);
  return result;
}

}  // namespace penstock::server
