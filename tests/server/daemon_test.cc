// The daemon as a stranger meets it: its options, its hello, and what becomes of peers that do not
// keep to it. The daemon is a real process; the client speaks the hello message by message.
#include <cuda.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "common/clock.h"
#include "common/unique_fd.h"
#include "protocol/hello.h"
#include "server/options.h"
#include "transport/tcp/socket.h"

namespace penstock::server {
namespace {

namespace tcp = transport::tcp;
constexpr size_t kMost = kMaxWelcomeBytes;

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/penstock-daemon-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() {
    for (const std::string& file : files_) unlink(file.c_str());
    rmdir(path_.c_str());
  }
  std::string File(const char* name) {
    files_.push_back(path_ + "/" + name);
    return files_.back();
  }
  std::string Write(const char* name, const std::string& text) {
    const std::string path = File(name);
    std::ofstream(path) << text;
    return path;
  }

 private:
  std::string path_;
  std::vector<std::string> files_;
};

class Daemon {
 public:
  explicit Daemon(std::vector<std::string> more = {}) {
    const std::string port_file = folder_.File("port");
    log_ = folder_.File("log");
    std::vector<std::string> arguments = {PENSTOCKD,     "--driver",         "sim",     "--listen",
                                          "127.0.0.1:0", "--port-file",      port_file, "--log",
                                          "info",        "--parent-pid-dies"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      if (freopen(log_.c_str(), "w", stderr) == nullptr) _exit(1);
      execv(argv[0], argv.data());
      _exit(127);
    }
    const Deadline deadline = Deadline::After(20'000);
    while (port_ == 0 && !deadline.expired()) {
      std::ifstream(port_file) >> port_;
      if (port_ == 0) usleep(5'000);
    }
    REQUIRE(port_ != 0);
  }
  ~Daemon() {
    kill(pid_, SIGTERM);
    int status = 0;
    waitpid(pid_, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
  UniqueFd Connect() {
    auto socket = tcp::Dial("127.0.0.1", port_, Deadline::After(5'000));
    REQUIRE(socket.has_value());
    return std::move(*socket);
  }
  std::string Log() const {
    std::ifstream file(log_);
    return std::string((std::istreambuf_iterator<char>(file)), {});
  }
  // Waits until the log holds the text.
  bool Logs(const std::string& text, int timeout_ms = 10'000) {
    const Deadline deadline = Deadline::After(timeout_ms);
    while (!deadline.expired()) {
      if (Log().find(text) != std::string::npos) return true;
      usleep(5'000);
    }
    return false;
  }
  size_t Lines(const std::string& text) const {
    const std::string all = Log();
    size_t count = 0;
    for (size_t at = 0; (at = all.find(text, at)) != std::string::npos; ++at) ++count;
    return count;
  }
  Folder& folder() { return folder_; }

 private:
  Folder folder_;
  std::string log_;
  pid_t pid_ = -1;
  uint16_t port_ = 0;
};

template <typename T>
void Send(const UniqueFd& socket, const T& message) {
  REQUIRE(tcp::SendBlob(socket.get(), std::as_bytes(std::span(&message, 1)), kMost,
                        Deadline::After(5'000)));
}

Result<std::vector<std::byte>> Receive(const UniqueFd& socket, int timeout_ms = 20'000) {
  return tcp::ReceiveBlob(socket.get(), kMost, Deadline::After(timeout_ms));
}

struct Greeted {
  UniqueFd socket;
  ClientHello hello;
  Challenge challenge;
  ParsedWelcome welcome;
};

// One line of the log says so, and the client hears of it, both within a second.
constexpr int kRefusedWithinMs = 1000;

// The control socket's half of a hello; the test looks at what came of it.
Greeted Greet(Daemon& daemon, const Key& key = {}, uint32_t gpus = 1) {
  Greeted greeted;
  greeted.socket = daemon.Connect();
  greeted.hello.gpus = gpus;
  CopyText(greeted.hello.host, "test");
  CopyText(greeted.hello.program, "daemon_test");
  REQUIRE(FillRandom(greeted.hello.nonce));
  Send(greeted.socket, greeted.hello);
  auto challenge = ParseChallenge(Receive(greeted.socket).value());
  REQUIRE(challenge.has_value());
  REQUIRE(challenge->refusal == Refusal::kNone);
  greeted.challenge = *challenge;
  Proof proof;
  proof.mac = ClientMac(key, greeted.hello, greeted.challenge);
  Send(greeted.socket, proof);
  auto welcome = ParseWelcome(Receive(greeted.socket).value());
  REQUIRE(welcome.has_value());
  greeted.welcome = *welcome;
  return greeted;
}

// The other half. The refusal, kNone if the session begins.
Refusal Bulk(Daemon& daemon, const Greeted& greeted, const Key& key, const Nonce& ticket,
             UniqueFd* socket) {
  *socket = daemon.Connect();
  BulkHello hello;
  hello.session = greeted.welcome.welcome.session;
  hello.mac = BulkMac(key, greeted.hello, greeted.challenge, ticket, hello.session, hello.epoch);
  Send(*socket, hello);
  auto welcome = ParseBulkWelcome(Receive(*socket).value());
  REQUIRE(welcome.has_value());
  return welcome->refusal;
}

Options Parsed(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "penstockd");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  auto options = ParseOptions(static_cast<int>(argv.size()), argv.data());
  if (!options) throw std::runtime_error(options.error().message);
  return *options;
}

}  // namespace

TEST_CASE("flags win over the file, and the file over the defaults", "[server][options]") {
  Folder folder;
  const std::string file = folder.Write(
      "c.toml", "listen = \"[::1]:77\"\ndriver = \"sim\"\nmax-sessions = 3\nsilence-seconds = 9\n");
  const Options options = Parsed({"--config", file, "--max-sessions", "5"});
  CHECK(options.listen_host == "::1");
  CHECK(options.listen_port == 77);
  CHECK(options.driver == "sim");
  CHECK(options.max_sessions == 5);
  CHECK(options.silence_seconds == 9);
  CHECK(options.isolate);
}

TEST_CASE("a wrong configuration is refused with its line", "[server][options]") {
  Folder folder;
  const std::string unknown = folder.Write("u.toml", "driver = \"sim\"\n\nlisten-port = 5\n");
  CHECK_THROWS_WITH(Parsed({"--config", unknown}),
                    Catch::Contains(":3: ") && Catch::Contains("listen-port"));
  const std::string kind = folder.Write("k.toml", "max-sessions = \"many\"\n");
  CHECK_THROWS_WITH(Parsed({"--config", kind}),
                    Catch::Contains(":1: ") && Catch::Contains("max-sessions"));
  const std::string broken = folder.Write("b.toml", "driver = \n");
  CHECK_THROWS_WITH(Parsed({"--config", broken}), Catch::Contains(":1: "));
  CHECK_THROWS_WITH(Parsed({"--listen", "nowhere"}), Catch::Contains("HOST:PORT"));
  CHECK_THROWS_WITH(Parsed({"--listen", "a:65536"}), Catch::Contains("65536"));
  CHECK_THROWS_WITH(Parsed({"--max-sessions", "0"}), Catch::Contains("(0)"));
  CHECK_THROWS_WITH(Parsed({"--no-such-flag"}), Catch::Contains("--help"));
}

TEST_CASE("GPUDirect is on, off or automatic, and on asks for RDMA", "[server][options]") {
  Folder folder;
  CHECK(Parsed({}).transport.gpu_direct == GpuDirectMode::kAuto);
  const std::string on = folder.Write("on.toml", "[transport]\ngpudirect = \"on\"\n");
  CHECK(Parsed({"--config", on}).transport.gpu_direct == GpuDirectMode::kOn);
  CHECK_THROWS_WITH(Parsed({"--config", on, "--transport", "tcp"}), Catch::Contains("(on)"));
  const std::string off = folder.Write("off.toml", "[transport]\ngpudirect = \"off\"\n");
  CHECK(Parsed({"--config", off}).transport.gpu_direct == GpuDirectMode::kOff);
  const std::string other = folder.Write("o.toml", "[transport]\ngpudirect = \"yes\"\n");
  CHECK_THROWS_WITH(Parsed({"--config", other}), Catch::Contains("(yes)"));
}

TEST_CASE("an open address without a key is refused", "[server][daemon]") {
  Folder folder;
  const std::string out = folder.File("err");
  for (const char* address : {"0.0.0.0:0", "[::]:0", ":0"}) {
    const std::string command =
        std::string(PENSTOCKD) + " --driver sim --listen " + address + " 2> " + out;
    const int status = system(command.c_str());
    CHECK(WEXITSTATUS(status) == 1);
    std::ifstream file(out);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    CHECK_THAT(text, Catch::Contains("--key-file"));
  }
}

TEST_CASE("a hello brings the devices, and a session begins with the bulk socket",
          "[server][daemon]") {
  Daemon daemon;
  const Greeted greeted = Greet(daemon);
  const Welcome& welcome = greeted.welcome.welcome;
  REQUIRE(welcome.refusal == Refusal::kNone);
  CHECK(SameMac(welcome.mac,
                ServerMac({}, greeted.hello, greeted.challenge, welcome.session, welcome.ticket)));
  REQUIRE(greeted.welcome.devices.size() == 1);
  const DeviceInfo& device = greeted.welcome.devices[0];
  CHECK(device.name[0] != '\0');
  CHECK(device.total_memory > 0);
  CHECK(device.attribute_known[CU_DEVICE_ATTRIBUTE_WARP_SIZE] == 1);
  CHECK(device.attributes[CU_DEVICE_ATTRIBUTE_WARP_SIZE] == 32);
  CHECK(welcome.server.driver_version >= 13000);
  UniqueFd bulk;
  CHECK(Bulk(daemon, greeted, {}, welcome.ticket, &bulk) == Refusal::kNone);
  CHECK(daemon.Logs("begins"));
  // Each socket belongs to one session only.
  UniqueFd second;
  CHECK(Bulk(daemon, greeted, {}, welcome.ticket, &second) == Refusal::kUnknownSession);
  bulk.reset();
  CHECK(daemon.Logs("ends after"));
}

TEST_CASE("the key is needed by both sockets, and is proved by the server", "[server][daemon]") {
  Folder folder;
  const std::string text = "a key of some length";
  const Key key(text.begin(), text.end());
  Daemon daemon({"--key-file", folder.Write("key", text + "\n")});
  Key wrong = key;
  wrong[0] ^= 1;
  CHECK(Greet(daemon, wrong).welcome.welcome.refusal == Refusal::kKey);
  CHECK(Greet(daemon, {}).welcome.welcome.refusal == Refusal::kKey);
  const Greeted greeted = Greet(daemon, key);
  const Welcome& welcome = greeted.welcome.welcome;
  REQUIRE(welcome.refusal == Refusal::kNone);
  CHECK(greeted.challenge.key_needed == 1);
  CHECK(SameMac(welcome.mac,
                ServerMac(key, greeted.hello, greeted.challenge, welcome.session, welcome.ticket)));
  UniqueFd bulk;
  Nonce other = welcome.ticket;
  other[5] ^= 1;
  CHECK(Bulk(daemon, greeted, key, other, &bulk) == Refusal::kUnknownSession);
  CHECK(Bulk(daemon, greeted, wrong, welcome.ticket, &bulk) == Refusal::kUnknownSession);
  CHECK(Bulk(daemon, greeted, key, welcome.ticket, &bulk) == Refusal::kNone);
}

// Whoever has no right to come in is told within a second, and one line of the log says who it was.
TEST_CASE("strangers are refused at once, with one line each", "[server][daemon]") {
  Folder folder;
  const std::string text = "a key of some length";
  const Key key(text.begin(), text.end());
  Daemon daemon({"--key-file", folder.Write("key", text + "\n")});
  const Deadline deadline = Deadline::After(kRefusedWithinMs);
  std::string words;
  SECTION("a wrong key") {
    words = "does not hold the server's key";
    Key wrong = key;
    wrong.back() ^= 1;
    CHECK(Greet(daemon, wrong).welcome.welcome.refusal == Refusal::kKey);
  }
  SECTION("no key") {
    words = "does not hold the server's key";
    CHECK(Greet(daemon, {}).welcome.welcome.refusal == Refusal::kKey);
  }
  SECTION("a proof of zeroes") {
    words = "does not hold the server's key";
    const UniqueFd socket = daemon.Connect();
    Send(socket, ClientHello{});
    REQUIRE(ParseChallenge(Receive(socket).value()).has_value());
    Send(socket, Proof{});
    CHECK(ParseWelcome(Receive(socket).value()).value().welcome.refusal == Refusal::kKey);
  }
  SECTION("a hello of another version") {
    words = "(900 to 901)";
    const UniqueFd socket = daemon.Connect();
    ClientHello hello;
    hello.oldest_version = 900;
    hello.newest_version = 901;
    Send(socket, hello);
    CHECK(ParseChallenge(Receive(socket).value()).value().refusal == Refusal::kVersion);
  }
  SECTION("another protocol") {
    words = "exceeds the limit";
    const UniqueFd socket = daemon.Connect();
    const std::string http = "GET / HTTP/1.1\r\nHost: gpu\r\n\r\n";
    REQUIRE(write(socket.get(), http.data(), http.size()) == static_cast<ssize_t>(http.size()));
    CHECK(ParseChallenge(Receive(socket).value()).value().refusal == Refusal::kMalformed);
  }
  CHECK_FALSE(deadline.expired());
  CHECK(daemon.Logs(words, kRefusedWithinMs));
  CHECK(daemon.Lines("Refused") == 1);
}

TEST_CASE("a recorded hello opens nothing", "[server][daemon]") {
  Folder folder;
  const std::string text = "a key of some length";
  const Key key(text.begin(), text.end());
  Daemon daemon({"--key-file", folder.Write("key", text + "\n")});
  Greeted recorded = Greet(daemon, key);
  REQUIRE(recorded.welcome.welcome.refusal == Refusal::kNone);
  UniqueFd bulk;
  const Nonce ticket = recorded.welcome.welcome.ticket;
  REQUIRE(Bulk(daemon, recorded, key, ticket, &bulk) == Refusal::kNone);
  const Deadline deadline = Deadline::After(kRefusedWithinMs);
  SECTION("on the control socket") {
    const UniqueFd socket = daemon.Connect();
    Send(socket, recorded.hello);
    const Challenge challenge = ParseChallenge(Receive(socket).value()).value();
    CHECK(challenge.nonce != recorded.challenge.nonce);
    Proof proof;
    proof.mac = ClientMac(key, recorded.hello, recorded.challenge);
    Send(socket, proof);
    CHECK(ParseWelcome(Receive(socket).value()).value().welcome.refusal == Refusal::kKey);
    CHECK(daemon.Logs("Refused", kRefusedWithinMs));
  }
  SECTION("on the bulk socket, while its session lives") {
    UniqueFd second;
    CHECK(Bulk(daemon, recorded, key, ticket, &second) == Refusal::kUnknownSession);
    CHECK(daemon.Logs("Refused", kRefusedWithinMs));
  }
  SECTION("on the bulk socket, after its session") {
    bulk.reset();
    recorded.socket.reset();
    REQUIRE(daemon.Logs("ends after"));
    const Deadline again = Deadline::After(kRefusedWithinMs);
    UniqueFd second;
    CHECK(Bulk(daemon, recorded, key, ticket, &second) == Refusal::kUnknownSession);
    CHECK_FALSE(again.expired());
    CHECK(daemon.Lines("Refused") == 1);
    return;
  }
  CHECK_FALSE(deadline.expired());
  CHECK(daemon.Lines("Refused") == 1);
}

TEST_CASE("what is refused is refused in words", "[server][daemon]") {
  Daemon daemon({"--max-sessions", "1"});
  SECTION("versions that do not overlap") {
    const UniqueFd socket = daemon.Connect();
    ClientHello hello;
    hello.oldest_version = hello.newest_version = 900;
    Send(socket, hello);
    const Challenge challenge = ParseChallenge(Receive(socket).value()).value();
    CHECK(challenge.refusal == Refusal::kVersion);
    CHECK_THAT(challenge.text, Catch::Contains("900"));
  }
  SECTION("more GPUs than there are") {
    const Greeted greeted = Greet(daemon, {}, 9);
    CHECK(greeted.welcome.welcome.refusal == Refusal::kTooMany);
    CHECK_THAT(greeted.welcome.welcome.text, Catch::Contains("(9)"));
  }
  SECTION("more sessions than allowed") {
    Greeted first = Greet(daemon);
    REQUIRE(first.welcome.welcome.refusal == Refusal::kNone);
    CHECK(Greet(daemon).welcome.welcome.refusal == Refusal::kFull);
    // A client that leaves before its session began leaves no session behind.
    first.socket.reset();
    CHECK(daemon.Logs("killed by signal 9"));
    CHECK(Greet(daemon).welcome.welcome.refusal == Refusal::kNone);
  }
  SECTION("garbage") {
    const UniqueFd socket = daemon.Connect();
    Send(socket, std::array<uint8_t, 256>{});
    CHECK(ParseChallenge(Receive(socket).value()).value().refusal == Refusal::kMalformed);
  }
  SECTION("a message that is too long") {
    const UniqueFd socket = daemon.Connect();
    const uint32_t length = 1u << 30;
    REQUIRE(write(socket.get(), &length, sizeof length) == sizeof length);
    CHECK(ParseChallenge(Receive(socket).value()).value().refusal == Refusal::kMalformed);
  }
  SECTION("the wrong message at the wrong time") {
    const UniqueFd socket = daemon.Connect();
    ClientHello hello;
    Send(socket, hello);
    REQUIRE(Receive(socket).has_value());
    Send(socket, hello);  // where the proof belongs
    CHECK(ParseWelcome(Receive(socket).value()).value().welcome.refusal == Refusal::kMalformed);
  }
  // Whatever it was, the daemon goes on.
  CHECK(ParseChallenge([&] {
          const UniqueFd socket = daemon.Connect();
          Send(socket, ClientHello{});
          return Receive(socket).value();
        }())
            .value()
            .refusal == Refusal::kNone);
}

TEST_CASE("peers that say nothing cost nobody else anything", "[server][daemon]") {
  Daemon daemon;
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 40; ++i) silent.push_back(daemon.Connect());
  CHECK(Greet(daemon).welcome.welcome.refusal == Refusal::kNone);
  // They are shown the door in the end: the socket closes.
  const auto received = Receive(silent[0], 15'000);
  REQUIRE_FALSE(received.has_value());
  CHECK(received.error().code != Code::kTimeout);
}

TEST_CASE("a crowd at the door keeps nobody out", "[server][daemon]") {
  Daemon daemon;
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(daemon.Connect());
  const Deadline deadline = Deadline::After(1'000);
  CHECK(Greet(daemon).welcome.welcome.refusal == Refusal::kNone);
  CHECK_FALSE(deadline.expired());
  CHECK(daemon.Logs("Too many connections (128)"));
  // The oldest of the host that has most had to go, at once and not at their deadline.
  const auto received = Receive(silent[0], 1'000);
  REQUIRE_FALSE(received.has_value());
  CHECK(received.error().code != Code::kTimeout);
  CHECK(daemon.Lines("Too many connections") <= 3);
}

TEST_CASE("strangers do not fill the log", "[server][daemon]") {
  Daemon daemon;
  const int64_t start = NowNanoseconds();
  for (int i = 0; i < 400; ++i) {
    const UniqueFd socket = daemon.Connect();
    Send(socket, std::array<uint8_t, 256>{});
    // Each of them is told.
    REQUIRE(ParseChallenge(Receive(socket).value()).value().refusal == Refusal::kMalformed);
  }
  const size_t refused = daemon.Lines("Refused");
  CHECK(refused >= 100);
  CHECK(refused <= 101 + static_cast<size_t>((NowNanoseconds() - start) / 100'000'000));
  // Whoever comes later is named again, after the number of those who were not.
  usleep(200'000);
  {
    const UniqueFd socket = daemon.Connect();
    ClientHello hello;
    hello.oldest_version = hello.newest_version = 900;
    Send(socket, hello);
    REQUIRE(Receive(socket).has_value());
  }
  CHECK(daemon.Logs("(900 to 900)"));
  CHECK(daemon.Logs("lines about strangers were left out"));
}

TEST_CASE("a peer that trickles its hello has no more time than a silent one", "[server][daemon]") {
  Daemon daemon;
  const UniqueFd socket = daemon.Connect();
  const uint32_t length = sizeof(ClientHello);
  const auto* bytes = reinterpret_cast<const char*>(&length);
  const Deadline deadline = Deadline::After(8'000);
  // A byte at a time, for as long as the daemon takes them.
  for (int i = 0; !deadline.expired(); ++i) {
    if (send(socket.get(), i < 4 ? bytes + i : "", 1, MSG_NOSIGNAL) != 1) break;
    usleep(100'000);
  }
  CHECK_FALSE(deadline.expired());
  CHECK(daemon.Logs("takes too long"));
}

TEST_CASE("a client that stops after its proof leaves no worker behind", "[server][daemon]") {
  Daemon daemon({"--max-sessions", "1"});
  const Greeted greeted = Greet(daemon);
  REQUIRE(greeted.welcome.welcome.refusal == Refusal::kNone);
  // It keeps its socket and says nothing more.
  CHECK(daemon.Logs("takes too long"));
  CHECK(daemon.Logs("killed by signal 9"));
  CHECK(Greet(daemon).welcome.welcome.refusal == Refusal::kNone);
}

}  // namespace penstock::server
