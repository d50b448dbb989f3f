// A session as the client library sees it: a server that answers anything to calls, moves that are
// reported at will, progress, output and host functions that nobody asked for. A program trusts its
// server with its data, but a broken server must end the session and not the program.
#include <fcntl.h>
#include <unistd.h>

#include "interposer/core/session.h"
#include "tests/fuzz/scripted_connection.h"

using namespace penstock;
using namespace penstock::interposer;

namespace {

// Answers whatever the peer says of slots, with memory of exactly the size of the copy.
class Pieces : public PieceServer {
 public:
  explicit Pieces(size_t bytes) : PieceServer(bytes), memory_(new std::byte[bytes]) {}
  void Serve(uint64_t, const BouncePiece& piece) override {
    fuzz::Require(Holds(piece));
    memset(memory_.get() + piece.offset, 1, piece.bytes);
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

std::unique_ptr<Session> Connect(fuzz::Input& input, uint8_t switches) {
  ParsedWelcome welcome;
  welcome.welcome.epoch = 1;
  welcome.welcome.server.stream_window = 8;
  welcome.welcome.server.driver_version = 13000;
  welcome.welcome.server.device_count = 1;
  welcome.devices.resize(1);
  memset(static_cast<void*>(welcome.devices.data()), 0, sizeof(DeviceInfo));
  SessionOptions options;
  options.reserve_addresses = false;
  options.staging = false;
  auto connection = std::make_unique<fuzz::ScriptedConnection>(input, (switches & 1) != 0);
  connection->AnswerLastCall();
  return std::make_unique<Session>(std::move(connection), std::move(welcome), options);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int null = [] {
    fuzz::Silence();
    return open("/dev/null", O_WRONLY | O_CLOEXEC);
  }();
  // What the server says is a program's output goes to descriptors 1 and 2.
  static const bool away = dup2(null, 1) == 1;
  (void)away;
  fuzz::Input input(data, size);
  const auto switches = input.Take<uint8_t>();
  auto session = Connect(input, switches);
  StreamRecord* stream = session->objects().streams.Mint(
      [&](StreamRecord& record, Handle) { record.context = &session->primary_contexts[0]; });
  const uint64_t payload = 1;
  for (int i = 0; i < 64 && session->state() == CUDA_SUCCESS; ++i) {
    OutgoingCall call;
    call.function = 7;
    call.command = &payload;
    call.command_bytes = sizeof payload;
    ReplyWaiter waiter;
    std::vector<std::byte> fixed(static_cast<size_t>(i % 4) * 8), direct((i & 4) != 0 ? 96 : 0);
    std::vector<std::byte> tail;
    Pieces pieces(4096 + static_cast<size_t>(i));
    waiter.fixed = fixed;
    if (!direct.empty()) {
      waiter.direct = direct;
    } else {
      waiter.tail = &tail;
    }
    if ((i & 8) != 0) waiter.pieces = &pieces;
    if ((i & 16) != 0) {
      call.cost = 1;
      (void)session->Post(call, stream);
    } else {
      (void)session->Invoke(call, &waiter);
    }
  }
  session->End();
  return 0;
}
