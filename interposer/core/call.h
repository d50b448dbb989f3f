// One CUDA call in progress: what every entry, generated or hand-written, is made of.
//
// An entry builds a Call on its stack, turns the program's arguments into wire values (each check
// records CUDA's error on failure), and ends with Post, Invoke or a local answer:
//
//   Call call(Function::kCuMemsetD8Async, Call::kContext);
//   commands::CuMemsetD8Async command{};
//   if (!call.ready() || !call.Stream(hStream, per_thread, &command.hStream) ||
//       !call.DeviceRange(dstDevice, N)) return call.result();
//   ...
//   return call.Post(command);
//
// Everything between Call and return runs on the application's thread; Post takes no lock but the
// call stream's and makes no system call.
//
// With several servers a call goes to one of them: that of the current context, unless a device, a
// stream or another object that the program names belongs elsewhere. Objects of two servers in one
// call are refused, but for the few functions that have a way (cuda/copy_across.cc, cuda/event.cc).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "functions.gen.h"  // enum class Function : uint32_t, from codegen/spec
#include "protocol/handle.h"
#include "protocol/operations.h"

namespace penstock::interposer {

class Client;
class Session;
struct ContextRecord;
struct EventRecord;
struct StreamRecord;
struct ThreadState;
struct OutgoingCall;
class PieceServer;
struct FunctionRecord;
struct ModuleRecord;
struct Objects;
struct ReplyWaiter;

class Call {
 public:
  enum Need : uint32_t {
    kNothing,      // works before cuInit
    kInitialised,  // CUDA_ERROR_NOT_INITIALIZED otherwise
    kContext,  // and a current, living context: CUDA_ERROR_INVALID_CONTEXT, CONTEXT_IS_DESTROYED,
               // or the context's sticky error; CUDA_ERROR_NOT_PERMITTED in a host function
  };
  // Counts the call under this function's name.
  Call(Function function, Need need);
  // A part of another call, to be done in this context, or for null at the session's server.
  Call(const Call& origin, Session& session, ContextRecord* context);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // False if the call must end now with result().
  bool ready() const { return result_ == CUDA_SUCCESS; }
  CUresult result() const { return result_; }
  // Records an error and returns false, for use in a chain of checks.
  bool Refuse(CUresult error) {
    result_ = error;
    return false;
  }

  Client& client() const { return *client_; }
  Session& session() const { return *session_; }  // where it goes, as far as that is known
  Objects& objects() const { return *objects_; }
  ContextRecord& context() const { return *context_; }  // with kContext
  ThreadState& thread() const { return *thread_; }      // once ready
  StreamRecord* stream() const { return stream_; }      // the one given to Stream()

  // Not in a host function: NOT_PERMITTED. (Included in kContext.)
  bool Permitted();

  // Argument checks, in the words of the spec. A wire value of 0 means the null handle.
  bool Out(const void* pointer);  // a pointer that must not be NULL: CUDA_ERROR_INVALID_VALUE
  bool Device(CUdevice device, int32_t* wire);               // INVALID_DEVICE
  bool Context(CUcontext context, uint64_t* wire);           // INVALID_CONTEXT
  bool ContextOrCurrent(CUcontext context, uint64_t* wire);  // NULL means the current one
  // NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD included; `per_thread`: NULL means the latter.
  // The per-thread stream is created on first use.
  bool Stream(CUstream stream, bool per_thread, uint64_t* wire);
  bool Event(CUevent event, uint64_t* wire);  // INVALID_HANDLE
  bool Module(CUmodule module, uint64_t* wire);
  bool FunctionOrKernel(CUfunction function, uint64_t* wire);
  // These two, and kernels above, load the library at this call's server where it is not yet.
  bool Library(CUlibrary library, uint64_t* wire);
  bool Kernel(CUkernel kernel, uint64_t* wire);
  bool MemoryPool(CUmemoryPool pool, uint64_t* wire);
  // The records behind them, as they are at this call's server; null after Refuse. A kernel does as
  // a function everywhere.
  FunctionRecord* FindFunction(CUfunction function);
  FunctionRecord* FindKernel(CUkernel kernel);
  ModuleRecord* FindLibrary(CUlibrary library);
  // The call concerns this context; refused with `error` if it goes to another server already.
  bool Bind(ContextRecord* context, CUresult error);

  // [address, address + bytes) lies in one live device allocation: INVALID_VALUE otherwise. Zero
  // bytes are fine anywhere; a Post after that has nothing to do and sends nothing.
  bool DeviceRange(CUdeviceptr address, uint64_t bytes);
  // height rows of width bytes, pitch apart.
  bool DeviceRange2D(CUdeviceptr address, uint64_t pitch, uint64_t width, uint64_t height);

  // Sends one way; the operation counts `cost` in the window of the stream given to Stream() (0:
  // not a stream operation), and the thread waits here, outside all locks, while the window is
  // full. CUDA_SUCCESS, or the error of a lost session.
  template <typename Command>
  CUresult Post(const Command& command, std::span<const std::span<const std::byte>> sections = {},
                uint32_t cost = 0) {
    static_assert(std::is_trivially_copyable_v<Command>);
    return PostBytes(Command::kFunction, &command, sizeof command, sections, cost);
  }
  // Sends and waits. The reply's fixed part goes to *reply (left alone on an error without one),
  // the rest to *tail if given.
  template <typename Command, typename Reply>
  CUresult Invoke(const Command& command, Reply* reply,
                  std::span<const std::span<const std::byte>> sections = {},
                  std::vector<std::byte>* tail = nullptr) {
    static_assert(std::is_trivially_copyable_v<Command> && std::is_trivially_copyable_v<Reply>);
    return InvokeBytes(Command::kFunction, &command, sizeof command, sections, reply, sizeof *reply,
                       tail);
  }
  template <typename Command>
  CUresult Invoke(const Command& command,
                  std::span<const std::span<const std::byte>> sections = {}) {
    return InvokeBytes(Command::kFunction, &command, sizeof command, sections, nullptr, 0, nullptr);
  }

  // For operations.h, whose structs carry no kFunction. `pieces` serves the bounce slots meanwhile.
  CUresult PostBytes(uint32_t function, const void* command, size_t bytes,
                     std::span<const std::span<const std::byte>> sections, uint32_t cost);
  CUresult InvokeBytes(uint32_t function, const void* command, size_t bytes,
                       std::span<const std::span<const std::byte>> sections, void* reply,
                       size_t reply_bytes, std::vector<std::byte>* tail,
                       PieceServer* pieces = nullptr);
  // The window's count of the stream after the last Post that had a cost: what its progress has to
  // reach before that operation is finished.
  uint64_t issued() const { return issued_; }
  // Synchronous uploads on the legacy stream may be posted if nothing can tell: see call.cc.
  bool MayPostUpload() const;
  void UploadPosted();
  // The last Post was an asynchronous download.
  void DownloadPosted();
  // The whole reply goes to memory of exactly its size (inline downloads).
  CUresult InvokeInto(uint32_t function, const void* command, size_t bytes,
                      std::span<std::byte> target);

  // No asynchronous download of the context is under way on a stream that others wait for.
  bool DownloadsDone(ContextRecord& context) const;

 private:
  // The library or kernel as it is at this call's server; null after Refuse. (cuda/library.cc)
  ModuleRecord* LibraryHere(ModuleRecord& library);
  FunctionRecord* KernelHere(FunctionRecord& kernel);
  bool GoTo(Session& session, ContextRecord* context);
  uint64_t WireContext() const;
  bool EventFits();
  CUresult Exchange(uint32_t function, const void* command, size_t bytes,
                    std::span<const std::span<const std::byte>> sections, uint32_t cost,
                    ReplyWaiter* waiter);
  bool Fits(const OutgoingCall& call);
  CUresult OrderAfterUploads();
  CUresult Noted(CUresult result);

  const Function function_;
  CUresult result_ = CUDA_SUCCESS;
  Client* client_ = nullptr;
  Objects* objects_ = nullptr;
  Session* session_ = nullptr;
  ContextRecord* context_ = nullptr;  // the current one, if it is alive
  ContextRecord* target_ = nullptr;   // the one that the server makes current; null for none
  bool bound_ = false;                // something that the program named decides the session
  ThreadState* thread_ = nullptr;
  const EventRecord* event_ = nullptr;  // from Event(), which comes before Stream()
  StreamRecord* stream_ = nullptr;      // from Stream(), for the window
  uint64_t issued_ = 0;
  bool nothing_ = false;  // a range of no bytes was given
};

}  // namespace penstock::interposer
