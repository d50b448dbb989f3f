// A table is an array of 8-byte words: word 0 holds its size in bytes, the others are functions
// (the exception is CONTEXT_LOCAL_STORAGE, which has no size word). Only the slots named below were
// ever seen to be called. The rest hold a function that logs table and slot and returns
// CUDA_ERROR_NOT_SUPPORTED, so that a new user of a table is told apart from a crash.
//
// Names and UUIDs: ZLUDA; sizes: ZLUDA and Wine's nvcuda. Semantics as noted at each function,
// [Z] = ZLUDA's or [S] = SCUDA's source, [O] = observed with the unmodified libraries.
#include "interop/export_tables.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <utility>

#include "interop/context_storage.h"
#include "interop/self_test.h"

namespace penstock::interop {
namespace {

// A plain struct of pointers: constant-initialised, never destroyed.
Host g_host{};

using Word = const void*;

template <typename Function>
Word Slot(Function* function) {
  return reinterpret_cast<Word>(function);
}

void LogRefused(const char* table, int slot) {
  if (g_host.log == nullptr) return;
  char line[160];
  std::snprintf(line, sizeof(line),
                "Slot (%d) of the private export table (%s) is not implemented: "
                "CUDA_ERROR_NOT_SUPPORTED.",
                slot, table);
  g_host.log(line);
}

struct CudartInterface {
  static constexpr char kName[] = "CUDART_INTERFACE";
};
struct RuntimeHooks {
  static constexpr char kName[] = "TOOLS_RUNTIME_CALLBACK_HOOKS";
};
struct ToolsTls {
  static constexpr char kName[] = "TOOLS_TLS";
};
struct ContextChecks {
  static constexpr char kName[] = "CONTEXT_CHECKS";
};
struct StreamQueries {
  static constexpr char kName[] = "21318c60, context and stream queries";
};
struct ModuleQueries {
  static constexpr char kName[] = "6e163fbe, module queries";
};

template <typename Table, int slot>
CUresult Refused() {
  LogRefused(Table::kName, slot);
  return CUDA_ERROR_NOT_SUPPORTED;
}

template <typename Table, size_t words, size_t... slots>
std::array<Word, words> MakeTable(std::index_sequence<slots...>) {
  std::array<Word, words> table = {Slot(&Refused<Table, static_cast<int>(slots)>)...};
  table[0] = reinterpret_cast<Word>(words * sizeof(Word));
  return table;
}

template <typename Table, size_t words>
std::array<Word, words> MakeTable() {
  return MakeTable<Table, words>(std::make_index_sequence<words>());
}

// Tables are leaked: the runtime's exit handler runs after static destructors.
template <typename Table, size_t words>
std::array<Word, words>* NewTable(std::initializer_list<std::pair<int, Word>> slots) {
  auto* table = new std::array<Word, words>(MakeTable<Table, words>());
  for (const auto& [index, function] : slots) (*table)[index] = function;
  return table;
}

// --- CUDART_INTERFACE ---------------------------------------------------------------------------

// [Z] The handle of a device's primary context; it stays inactive. [O] Called for every device
// while the runtime enumerates them, and made current before cuDevicePrimaryCtxRetain.
CUresult PrimaryContextHandle(CUcontext* context, CUdevice device) {
  return g_host.primary_context(device, context);
}

const Word* CudartInterfaceTable() {
  static auto* const table = NewTable<CudartInterface, 13>({{2, Slot(&PrimaryContextHandle)}});
  return table->data();
}

// --- TOOLS_RUNTIME_CALLBACK_HOOKS ---------------------------------------------------------------

// [O] Flags indexed by CUPTI's runtime callback id; a non-zero one makes the runtime call back on
// that function. A 13.0 runtime reads 523 of them without looking at the count: more than any
// version is known to use.
constexpr size_t kRuntimeFlags = 4096;
uint32_t g_runtime_flags[kRuntimeFlags];
uint32_t g_module_flags[kRuntimeFlags];

void RuntimeCallbackFlags(uint32_t** flags, size_t* count) {
  *flags = g_runtime_flags;
  *count = kRuntimeFlags;
}

// [O] The same for module events; fewer than 14 is error 35.
void ModuleCallbackFlags(uint32_t** flags, size_t* count) {
  *flags = g_module_flags;
  *count = kRuntimeFlags;
}

const Word* RuntimeHooksTable() {
  static auto* const table = NewTable<RuntimeHooks, 7>(
      {{2, Slot(&RuntimeCallbackFlags)}, {6, Slot(&ModuleCallbackFlags)}});
  return table->data();
}

// --- TOOLS_TLS ----------------------------------------------------------------------------------

// [O] The value is passed on as a context: the current one. Used by cuBLAS.
CUresult ToolsCurrentContext(CUcontext* context) {
  *context = g_host.current_context();
  return CUDA_SUCCESS;
}

const Word* ToolsTlsTable() {
  static auto* const table = NewTable<ToolsTls, 4>({{2, Slot(&ToolsCurrentContext)}});
  return table->data();
}

// --- CONTEXT_LOCAL_STORAGE ----------------------------------------------------------------------

// [Z] Signatures; [O] a null context means the current one, and a miss has to be an error.
CUcontext OrCurrent(CUcontext context) {
  return context != nullptr ? context : g_host.current_context();
}

CUresult ClsPut(CUcontext context, void* key, void* value, StorageDestructor destructor) {
  context = OrCurrent(context);
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  return StoragePut(context, key, value, destructor);
}

CUresult ClsDelete(CUcontext context, void* key) {
  context = OrCurrent(context);
  return context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : StorageDelete(context, key);
}

CUresult ClsGet(void** value, CUcontext context, void* key) {
  context = OrCurrent(context);
  return context == nullptr ? CUDA_ERROR_INVALID_HANDLE : StorageGet(context, key, value);
}

const Word* ContextLocalStorageTable() {
  static const Word table[4] = {Slot(&ClsPut), Slot(&ClsDelete), Slot(&ClsGet), nullptr};
  return table;
}

// --- CONTEXT_CHECKS -----------------------------------------------------------------------------

// [Z] Called at context initialisation, synchronise and reset; its error is passed to the program.
CUresult CheckContext(CUcontext, uint32_t* result, void** detail) {
  if (result != nullptr) *result = 0;
  if (detail != nullptr) *detail = nullptr;
  return CUDA_SUCCESS;
}

// [Z] Non-zero only adds one more cuCtxSetCurrent [O].
uint32_t CheckContextFlags() {
  return 0;
}

const Word* ContextChecksTable() {
  static auto* const table =
      NewTable<ContextChecks, 16>({{2, Slot(&CheckContext)}, {3, Slot(&CheckContextFlags)}});
  return table->data();
}

// --- INTEGRITY_CHECK ----------------------------------------------------------------------------

const Word* IntegrityTable();

CUresult IntegrityCheck(uint32_t version, uint64_t unix_seconds, unsigned char answer[16]) {
  SelfTestInput input;
  input.driver_version = static_cast<uint32_t>(g_host.driver_version());
  input.version = version;
  input.process_id = static_cast<uint32_t>(getpid());
  input.thread_low = static_cast<uint32_t>(pthread_self());
  input.cudart_interface_table = reinterpret_cast<uint64_t>(CudartInterfaceTable());
  input.integrity_table = reinterpret_cast<uint64_t>(IntegrityTable());
  input.integrity_function = reinterpret_cast<uint64_t>(IntegrityTable()[1]);
  input.unix_seconds = unix_seconds;
  std::vector<DeviceIdentity> devices(static_cast<size_t>(g_host.device_count()));
  for (size_t i = 0; i < devices.size(); ++i) {
    const CUresult result = g_host.device_identity(static_cast<int>(i), &devices[i]);
    if (result != CUDA_SUCCESS) return result;
  }
  SelfTestAnswer(input, devices, answer);
  return CUDA_SUCCESS;
}

const Word* IntegrityTable() {
  static const Word table[3] = {reinterpret_cast<Word>(sizeof(table)), Slot(&IntegrityCheck),
                                nullptr};
  return table;
}

// --- 21318c60: context and stream queries -------------------------------------------------------

// [Z] Equal to cuCtxGetId on a real driver. cuBLAS asks it about 70 times per heuristic search.
CUresult QueryContextId(CUcontext context, unsigned long long* id) {
  return g_host.context_id(OrCurrent(context), id);
}

// [S] [O] Gives an object of the stream that only slot 39 takes: the stream itself serves. The null
// stream becomes its explicit name, since the object must not be null.
CUresult QueryStreamObject(CUcontext, CUstream stream, void** object) {
  *object = stream != nullptr ? static_cast<void*>(stream) : static_cast<void*>(CU_STREAM_LEGACY);
  return CUDA_SUCCESS;
}

// [O] Looks like the stream's id; SCUDA answers 0, which is accepted too.
CUresult QueryStreamId(CUcontext context, void* object, uint64_t* id) {
  unsigned long long value = 0;
  const CUresult result =
      g_host.stream_id(OrCurrent(context), static_cast<CUstream>(object), &value);
  *id = value;
  return result;
}

const Word* StreamQueriesTable() {
  static auto* const table = NewTable<StreamQueries, 96>(
      {{4, Slot(&QueryContextId)}, {39, Slot(&QueryStreamId)}, {51, Slot(&QueryStreamObject)}});
  return table->data();
}

// --- 6e163fbe: module queries -------------------------------------------------------------------

using FunctionCallback = void (*)(void* user, CUfunction function, void* owner);

struct Enumeration {
  FunctionCallback callback;
  CUmodule module;
  void* user;
};

// [S] [O] Calls back for every function of the module; 0 means failure, on which cuFFT gives up.
uint64_t EnumerateModule(CUcontext, CUmodule module, FunctionCallback callback, void* user) {
  Enumeration enumeration{callback, module, user};
  const CUresult result = g_host.enumerate_functions(
      module,
      [](void* opaque, CUfunction function) {
        auto* e = static_cast<Enumeration*>(opaque);
        e->callback(e->user, function, e->module);
      },
      &enumeration);
  return result == CUDA_SUCCESS ? 1 : 0;
}

const Word* ModuleQueriesTable() {
  static auto* const table = NewTable<ModuleQueries, 105>({{7, Slot(&EnumerateModule)}});
  return table->data();
}

// --- the list -----------------------------------------------------------------------------------

struct Entry {
  unsigned char id[16];
  const Word* (*table)();
};

constexpr Entry kTables[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d,
      0xf9},
     &CudartInterfaceTable},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a,
      0x66},
     &RuntimeHooksTable},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec,
      0xdc},
     &ToolsTlsTable},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95,
      0x93},
     &ContextLocalStorageTable},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa,
      0x7e},
     &ContextChecksTable},
    {{0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1,
      0xf2},
     &IntegrityTable},
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8,
      0xf2},
     &StreamQueriesTable},
    {{0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99,
      0x1e},
     &ModuleQueriesTable},
};

}  // namespace

void SetHost(const Host& host) {
  g_host = host;
}

CUresult GetExportTable(const void** table, const CUuuid* id) {
  if (table == nullptr || id == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *table = nullptr;
  for (const Entry& entry : kTables) {
    if (std::memcmp(entry.id, id->bytes, sizeof(entry.id)) == 0) {
      *table = entry.table();
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_VALUE;
}

void DropContext(CUcontext context) {
  StorageDropContext(context);
}

}  // namespace penstock::interop
