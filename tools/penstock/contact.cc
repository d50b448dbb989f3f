#include "tools/penstock/contact.h"

#include <unistd.h>

#include <cstring>

#include "protocol/hello.h"
#include "transport/tcp/socket.h"

namespace penstock {
namespace {

namespace tcp = transport::tcp;

constexpr int64_t kContactMs = 5'000;

template <typename T>
std::span<const std::byte> Bytes(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

Status Refused(Refusal refusal, const char* text) {
  return Fail(refusal == Refusal::kKey ? Code::kUnauthenticated : Code::kUnavailable,
              std::string("The server refuses (") + RefusalName(refusal) + "): " + text);
}

}  // namespace

Result<UniqueFd> Contact(const config::PoolServer& server) {
  ASSIGN_OR_RETURN(const config::Endpoint endpoint, config::ParseEndpoint(server.address));
  Key key;
  if (!server.key_file.empty()) {
    ASSIGN_OR_RETURN(key, ReadKeyFile(server.key_file));
  }
  const Deadline deadline = Deadline::After(kContactMs);
  ASSIGN_OR_RETURN(UniqueFd socket, tcp::Dial(endpoint.host, endpoint.port, deadline));
  ClientHello hello;
  hello.role = Role::kManagement;
  hello.pid = static_cast<uint32_t>(getpid());
  gethostname(hello.host, sizeof hello.host - 1);
  strcpy(hello.program, "penstock");
  RETURN_IF_ERROR(FillRandom(hello.nonce));
  RETURN_IF_ERROR(tcp::SendBlob(socket.get(), Bytes(hello), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const auto challenge_bytes,
                   tcp::ReceiveBlob(socket.get(), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const Challenge challenge, ParseChallenge(challenge_bytes));
  if (challenge.refusal != Refusal::kNone) {
    RETURN_IF_ERROR(Refused(challenge.refusal, challenge.text));
  }
  if (challenge.key_needed != 0 && key.empty()) {
    return Fail(Code::kUnauthenticated, "The server asks for a key, and none is given.");
  }
  Proof proof;
  proof.mac = ClientMac(key, hello, challenge);
  RETURN_IF_ERROR(tcp::SendBlob(socket.get(), Bytes(proof), kMaxHelloBytes, deadline));
  ASSIGN_OR_RETURN(const auto welcome_bytes,
                   tcp::ReceiveBlob(socket.get(), kMaxWelcomeBytes, deadline));
  ASSIGN_OR_RETURN(const ParsedWelcome parsed, ParseWelcome(welcome_bytes));
  const Welcome& welcome = parsed.welcome;
  if (welcome.refusal != Refusal::kNone) {
    RETURN_IF_ERROR(Refused(welcome.refusal, welcome.text));
  }
  if (!SameMac(welcome.mac, ServerMac(key, hello, challenge, welcome.session, welcome.ticket))) {
    return Fail(Code::kUnauthenticated,
                "The server does not hold the key; it is not the one that the key belongs to.");
  }
  return socket;
}

}  // namespace penstock
