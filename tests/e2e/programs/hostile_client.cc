// A client that means harm, for hostile.py. It says hello properly, as only a key holder could, and
// then does what no honest client does:
//
//   hostile_client HOST:PORT garbage N     N sessions of random frames
//   hostile_client HOST:PORT mutate N DIR  N recorded sessions (tests/fuzz/corpus/worker), damaged
//   hostile_client HOST:PORT counts        frames whose counts and lengths are as large as can be
//   hostile_client HOST:PORT ids           handles, addresses and sessions that are others'
//   hostile_client HOST:PORT flood         calls by the hundred thousand, and no reply is read
//   hostile_client HOST:PORT half          half a frame, then nothing; ends when killed
//   hostile_client HOST:PORT connections   connections by the thousand
//
// Status 0: the server answered each with an error or ended the session, as it should.
#include <cuda.h>
#include <dirent.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "commands.gen.h"
#include "protocol/frame.h"
#include "protocol/handle.h"
#include "protocol/hello.h"
#include "protocol/operations.h"
#include "transport/tcp/tcp.h"

using namespace penstock;
using namespace penstock::transport;

namespace {

std::string host;
uint16_t port = 0;

[[noreturn]] void Die(const std::string& why) {
  fprintf(stderr, "hostile_client: %s\n", why.c_str());
  exit(1);
}

void Expect(bool holds, const char* what) {
  if (!holds) Die(what);
}

UniqueFd Connect() {
  auto socket = tcp::Dial(host, port, Deadline::After(10'000));
  if (!socket) Die(socket.error().message);
  return std::move(*socket);
}

template <typename T>
void SendMessage(const UniqueFd& socket, const T& message) {
  auto sent = tcp::SendBlob(socket.get(), std::as_bytes(std::span(&message, 1)), kMaxWelcomeBytes,
                            Deadline::After(10'000));
  if (!sent) Die(sent.error().message);
}

std::vector<std::byte> ReceiveMessage(const UniqueFd& socket) {
  auto blob = tcp::ReceiveBlob(socket.get(), kMaxWelcomeBytes, Deadline::After(60'000));
  if (!blob) Die(blob.error().message);
  return std::move(*blob);
}

template <typename T>
T Must(Result<T> parsed) {
  if (!parsed) Die(parsed.error().message);
  return std::move(*parsed);
}

struct Sockets {
  UniqueFd control, bulk;
  uint64_t session = 0;
};

Sockets Enter() {
  Sockets sockets;
  sockets.control = Connect();
  ClientHello hello;
  CopyText(hello.host, "evil\n\x1b[31mhost");
  CopyText(hello.program, "hostile_client");
  SendMessage(sockets.control, hello);
  const auto challenge = Must(ParseChallenge(ReceiveMessage(sockets.control)));
  Proof proof;
  proof.mac = ClientMac({}, hello, challenge);
  SendMessage(sockets.control, proof);
  const Welcome welcome = Must(ParseWelcome(ReceiveMessage(sockets.control))).welcome;
  if (welcome.refusal != Refusal::kNone) Die(welcome.text);
  sockets.session = welcome.session;
  sockets.bulk = Connect();
  BulkHello bulk;
  bulk.session = welcome.session;
  bulk.mac = BulkMac({}, hello, challenge, welcome.ticket, bulk.session, bulk.epoch);
  SendMessage(sockets.bulk, bulk);
  const auto taken = Must(ParseBulkWelcome(ReceiveMessage(sockets.bulk)));
  if (taken.refusal != Refusal::kNone) Die(taken.text);
  return sockets;
}

// A session that sends whatever it is told, and remembers what comes.
class Session : public Handler {
 public:
  Session() {
    Sockets sockets = Enter();
    connection_ = tcp::Adopt(std::move(sockets.control), std::move(sockets.bulk), {});
  }

  void SendFrame(std::vector<std::byte> frame) {
    const auto length = static_cast<uint32_t>(frame.size());
    memcpy(frame.data(), &length, sizeof length);
    std::byte* slot = nullptr;
    const Deadline deadline = Deadline::After(20'000);
    Outcome outcome;
    while ((outcome = connection_->Reserve(length, &slot)) == Outcome::kAgain) {
      connection_->Wait(64, *this, Deadline::After(1));
      Expect(!deadline.expired(), "The server takes no more frames.");
    }
    if (outcome == Outcome::kClosed) return;
    memcpy(slot, frame.data(), length);
    connection_->Commit(length, kFlush);
  }
  // `body` may be longer or shorter than what the function's decoder wants.
  uint64_t SendBytes(uint32_t function, std::span<const std::byte> body, uint16_t flags) {
    FrameHeader header{};
    header.type = FrameType::kCall;
    header.flags = flags;
    header.epoch = 1;
    header.function = function;
    header.sequence = ++sequence_;
    header.acknowledged = received_;
    header.subject = PrimaryContext(0).bits;
    std::vector<std::byte> frame(sizeof header + body.size());
    memcpy(frame.data(), &header, sizeof header);
    if (!body.empty()) memcpy(frame.data() + sizeof header, body.data(), body.size());
    header.bytes = static_cast<uint32_t>(frame.size());
    memcpy(frame.data(), &header, sizeof header);
    SendFrame(std::move(frame));
    return sequence_;
  }
  template <typename Command>
  uint64_t Send(uint32_t function, const Command& command, uint16_t flags = kNeedsReply) {
    static_assert(std::is_trivially_copyable_v<Command>);
    return SendBytes(function, std::as_bytes(std::span(&command, 1)), flags);
  }
  // The reply's result; -1 if the session ends instead.
  int32_t Ask(uint64_t sequence, std::vector<std::byte>* body = nullptr) {
    const Deadline deadline = Deadline::After(30'000);
    while (true) {
      if (answered_ == sequence) {
        if (body != nullptr) *body = body_;
        return result_;
      }
      if (goodbye_ || connection_->Wait(1, *this, Deadline::After(100)) < 0) return -1;
      Expect(!deadline.expired(), "The server neither answers nor ends the session.");
    }
  }
  // Gives an answer a moment to come, as a program waits for it.
  void Pause(uint64_t sequence) {
    const Deadline deadline = Deadline::After(50);
    while (answered_ != sequence && !over() && !deadline.expired()) {
      connection_->Wait(1, *this, deadline);
    }
  }
  bool Ends() {
    const Deadline deadline = Deadline::After(30'000);
    while (!goodbye_ && connection_->Wait(64, *this, Deadline::After(100)) >= 0) {
      if (deadline.expired()) return false;
    }
    return true;
  }
  const std::string& last_words() const { return words_; }
  bool over() const { return goodbye_ || connection_->closed(); }

  bool OnFrame(std::span<const std::byte> frame) override {
    FrameHeader header;
    memcpy(&header, frame.data(), sizeof header);
    if (header.sequence != 0) received_ = header.sequence;
    if (header.type == FrameType::kReply) {
      answered_ = header.subject;
      result_ = header.result;
      body_.assign(frame.begin() + sizeof header, frame.end());
    } else if (header.type == FrameType::kGoodbye) {
      goodbye_ = true;
      words_ = reinterpret_cast<const char*>(frame.data() + sizeof header);
    }
    return true;
  }
  void OnBulkDone(uint64_t, BulkStatus, uint64_t) override {}

 private:
  std::unique_ptr<Connection> connection_;
  uint64_t sequence_ = 0, received_ = 0, answered_ = 0;
  int32_t result_ = 0;
  std::vector<std::byte> body_;
  std::string words_;
  bool goodbye_ = false;
};

std::vector<std::byte> Random(std::mt19937& random, size_t bytes) {
  std::vector<std::byte> noise(bytes);
  for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
  return noise;
}

void Garbage(int sessions) {
  for (int seed = 0; seed < sessions; ++seed) {
    std::mt19937 random(seed);
    Session session;
    // The first few are almost frames, so that more than the first check is tried.
    for (int i = 0; i < 50 && !session.over(); ++i) {
      if (seed % 2 == 0) {
        session.SendFrame(Random(random, 8 + random() % 4000));
      } else {
        const uint32_t function = random() % 3 == 0 ? 0x8001 + random() % 10 : random() % 700;
        session.SendBytes(function, Random(random, random() % 400 / 8 * 8), kNeedsReply);
      }
    }
    Expect(session.Ends(), "A session of garbage goes on.");
  }
  printf("%d sessions have ended\n", sessions);
}

void Mutate(int sessions, const std::string& folder) {
  std::vector<std::string> files;
  DIR* listing = opendir(folder.c_str());
  if (listing == nullptr) Die("There is no folder (" + folder + ").");
  while (const dirent* entry = readdir(listing)) {
    if (entry->d_name[0] != '.') files.push_back(folder + "/" + entry->d_name);
  }
  closedir(listing);
  std::sort(files.begin(), files.end());
  Expect(!files.empty(), "There are no recorded sessions.");
  for (int seed = 0; seed < sessions; ++seed) {
    std::mt19937 random(seed);
    std::ifstream file(files[seed % files.size()], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    Session session;
    // A byte of switches, then records: length and flags of two bytes each, and a frame.
    size_t at = 1;
    for (int frames = 0; frames < 200 && at + 4 < bytes.size() && !session.over(); ++frames) {
      uint16_t length;
      memcpy(&length, bytes.data() + at, sizeof length);
      at += 4;
      if (length < sizeof(FrameHeader) || at + length > bytes.size()) break;
      FrameHeader header;
      memcpy(&header, bytes.data() + at, sizeof header);
      std::vector<std::byte> body(length - sizeof header);
      if (!body.empty()) memcpy(body.data(), bytes.data() + at + sizeof header, body.size());
      at += length;
      if (header.type != FrameType::kCall) continue;
      for (int i = 0; i < 2 && !body.empty() && random() % 12 == 0; ++i) {
        const size_t place = random() % body.size();
        const uint64_t extreme = random() % 2 == 0 ? ~uint64_t{0} : uint64_t{1} << random() % 64;
        memcpy(body.data() + place, &extreme, std::min(body.size() - place, sizeof extreme));
      }
      if (random() % 40 == 0) body.resize(body.size() / 16 * 8);
      const uint64_t sequence = session.SendBytes(header.function, body, header.flags);
      if ((header.flags & kNeedsReply) != 0) session.Pause(sequence);
    }
    // What is left of it may answer, but need not: its kernels may spin, with damaged parameters.
    if (!session.over()) {
      session.Pause(session.Send(commands::CuMemGetInfo::kFunction, commands::CuMemGetInfo{}));
    }
  }
  printf("%d sessions are over\n", sessions);
}

template <typename Command>
void MustEnd(uint32_t function, const Command& command, const char* what) {
  Session session;
  session.Send(function, command);
  Expect(session.Ends(), what);
  Expect(!session.last_words().empty(), "The server does not say why it ends the session.");
  printf("%s\n", session.last_words().c_str());
}

void Counts() {
  LoadModuleCommand load{};
  load.handle = Handle::Make(HandleKind::kModule, 1, 1).bits;
  load.kind = ModuleKind::kModule;
  load.format = ImageFormat::kContainer;
  load.part_count = 0xffffffff;
  MustEnd(static_cast<uint32_t>(Operation::kLoadModule), load, "4 G parts of a module are taken.");
  load.part_count = 1;
  load.option_count = 0xffffffff;
  MustEnd(static_cast<uint32_t>(Operation::kLoadModule), load, "4 G options are taken.");
  GetFunctionCommand name{};
  name.handle = Handle::Make(HandleKind::kFunction, 1, 1).bits;
  name.name_bytes = 0xfffffff8;
  MustEnd(static_cast<uint32_t>(Operation::kGetFunction), name, "A name of 4 GiB is taken.");
  LaunchCommand launch{};
  launch.parameter_bytes = 0xffffffff;
  launch.attribute_count = 0xffffffff;
  MustEnd(static_cast<uint32_t>(Operation::kLaunch), launch, "Parameters of 4 GiB are taken.");
  UploadCommand upload{};
  upload.place = HostPlace::kInline;
  upload.width = upload.height = ~uint64_t{0} / 2;
  MustEnd(static_cast<uint32_t>(Operation::kUpload), upload, "An upload of 2^126 bytes is taken.");
  // More memory than any GPU has is no malice, but an error.
  Session session;
  for (const uint64_t bytes : {uint64_t{1} << 62, ~uint64_t{0}}) {
    Expect(session.Ask(session.Send(commands::CuMemAlloc::kFunction,
                                    commands::CuMemAlloc{bytes})) == CUDA_ERROR_OUT_OF_MEMORY,
           "An allocation of 2^62 bytes is not refused.");
  }
}

void Ids() {
  // Addresses: every place where a tenant's memory may lie, since all workers allocate alike.
  Session session;
  std::vector<std::byte> body;
  Expect(session.Ask(session.Send(commands::CuMemAlloc::kFunction, commands::CuMemAlloc{4096}),
                     &body) == CUDA_SUCCESS,
         "An honest allocation fails.");
  uint64_t mine = 0;
  memcpy(&mine, body.data(), sizeof mine);
  for (int64_t step = -64; step <= 64; ++step) {
    if (step == 0) continue;
    DownloadCommand read{};
    read.source = mine + static_cast<uint64_t>(step) * 0x10000;
    read.stream = kLegacyStream.bits;
    read.width = read.source_pitch = read.host_pitch = 16;
    read.height = 1;
    read.place = HostPlace::kInline;
    read.reply_when = ReplyWhen::kDone;
    const auto sequence = session.Send(static_cast<uint32_t>(Operation::kDownload), read);
    Expect(session.Ask(sequence) == CUDA_ERROR_INVALID_VALUE, "Memory that is not ours is read.");
    commands::CuMemFree free{read.source};
    Expect(session.Ask(session.Send(free.kFunction, free)) == CUDA_ERROR_INVALID_VALUE,
           "Memory that is not ours is freed.");
  }
  // Handles that others have: the smallest of each kind.
  for (uint32_t kind = 1; kind < 16; ++kind) {
    Session other;
    commands::CuStreamSynchronize command{};
    command.hStream = Handle::Make(static_cast<HandleKind>(kind), 1, 1).bits;
    const int32_t result = other.Ask(other.Send(command.kFunction, command));
    Expect(result != CUDA_SUCCESS, "A stream that is not ours is waited for.");
  }
  // Bulk sockets for all sessions there may be.
  for (uint64_t victim = 1; victim < 60; ++victim) {
    const UniqueFd socket = Connect();
    BulkHello hello;
    hello.session = victim;
    SendMessage(socket, hello);
    Expect(Must(ParseBulkWelcome(ReceiveMessage(socket))).refusal == Refusal::kUnknownSession,
           "Another's session is joined.");
  }
  printf("everything is refused\n");
}

// On the raw socket: no reply is ever read.
void Flood() {
  const Sockets sockets = Enter();
  FrameHeader header{};
  header.bytes = sizeof header;
  header.type = FrameType::kCall;
  header.flags = kNeedsReply;
  header.epoch = 1;
  header.function = commands::CuMemGetInfo::kFunction;
  header.subject = PrimaryContext(0).bits;
  const commands::CuMemGetInfo command{};
  header.bytes += sizeof command;
  std::vector<std::byte> batch;
  timeval patience = {3, 0};
  setsockopt(sockets.control.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  uint64_t sent = 0;
  for (int round = 0; round < 400; ++round) {
    batch.clear();
    for (int i = 0; i < 1000; ++i) {
      ++header.sequence;
      const auto bytes = std::as_bytes(std::span(&header, 1));
      batch.insert(batch.end(), bytes.begin(), bytes.end());
      const auto rest = std::as_bytes(std::span(&command, 1));
      batch.insert(batch.end(), rest.begin(), rest.end());
      batch.resize((batch.size() + 7) / 8 * 8);
    }
    size_t at = 0;
    while (at < batch.size()) {
      const ssize_t got =
          send(sockets.control.get(), batch.data() + at, batch.size() - at, MSG_NOSIGNAL);
      if (got <= 0) {  // it is hung up on, or held back
        printf("stopped after %lu calls\n", sent);
        return;
      }
      at += static_cast<size_t>(got);
    }
    sent += 1000;
  }
  printf("sent %lu calls\n", sent);
}

void Half() {
  const Sockets sockets = Enter();
  const uint32_t length = 4096;
  Expect(send(sockets.control.get(), &length, sizeof length, MSG_NOSIGNAL) == sizeof length,
         "Half a frame is not taken.");
  printf("waiting\n");
  fflush(stdout);
  pause();
}

void Connections() {
  std::vector<UniqueFd> sockets;
  for (int i = 0; i < 3000; ++i) {
    if (sockets.size() == 500) sockets.erase(sockets.begin());
    sockets.push_back(Connect());
  }
  printf("connected\n");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) Die("Usage: hostile_client HOST:PORT MODE ...");
  const std::string address = argv[1], mode = argv[2];
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) Die("Address (" + address + ") has no port.");
  host = address.substr(0, colon);
  port = static_cast<uint16_t>(atoi(address.c_str() + colon + 1));
  const int sessions = argc > 3 ? atoi(argv[3]) : 0;
  if (mode == "garbage") {
    Garbage(sessions);
  } else if (mode == "mutate" && argc > 4) {
    Mutate(sessions, argv[4]);
  } else if (mode == "counts") {
    Counts();
  } else if (mode == "ids") {
    Ids();
  } else if (mode == "flood") {
    Flood();
  } else if (mode == "half") {
    Half();
  } else if (mode == "connections") {
    Connections();
  } else {
    Die("There is no mode (" + mode + ").");
  }
  return 0;
}
