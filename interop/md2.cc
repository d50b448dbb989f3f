#include "interop/md2.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace penstock::interop {
namespace {

constexpr size_t kBlock = 16;
constexpr int kRounds = 18;

// RFC 1319, section 3.2: the permutation made from the digits of pi.
constexpr unsigned char kPi[256] = {
    41,  46,  67,  201, 162, 216, 124, 1,   61,  54,  84,  161, 236, 240, 6,   19,  98,  167, 5,
    243, 192, 199, 115, 140, 152, 147, 43,  217, 188, 76,  130, 202, 30,  155, 87,  60,  253, 212,
    224, 22,  103, 66,  111, 24,  138, 23,  229, 18,  190, 78,  196, 214, 218, 158, 222, 73,  160,
    251, 245, 142, 187, 47,  238, 122, 169, 104, 121, 145, 21,  178, 7,   63,  148, 194, 16,  137,
    11,  34,  95,  33,  128, 127, 93,  154, 90,  144, 50,  39,  53,  62,  204, 231, 191, 247, 151,
    3,   255, 25,  48,  179, 72,  165, 181, 209, 215, 94,  146, 42,  172, 86,  170, 198, 79,  184,
    56,  210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4,   241, 69,  157, 112, 89,  100,
    113, 135, 32,  134, 91,  207, 101, 230, 45,  168, 2,   27,  96,  37,  173, 174, 176, 185, 246,
    28,  70,  97,  105, 52,  64,  126, 15,  85,  71,  163, 35,  221, 81,  175, 58,  195, 92,  249,
    206, 186, 197, 234, 38,  44,  83,  13,  110, 133, 40,  132, 9,   211, 223, 205, 244, 65,  129,
    77,  82,  106, 220, 55,  200, 108, 193, 171, 250, 36,  225, 123, 8,   12,  189, 177, 74,  120,
    136, 149, 139, 227, 99,  232, 109, 233, 203, 213, 254, 59,  0,   29,  57,  242, 239, 183, 14,
    102, 88,  208, 228, 166, 119, 114, 248, 235, 117, 75,  10,  49,  68,  80,  180, 143, 237, 31,
    26,  219, 153, 141, 51,  159, 17,  131, 20};

void Transform(const unsigned char block[kBlock], unsigned char state[kBlock],
               unsigned char checksum[kBlock]) {
  unsigned char x[3 * kBlock];
  for (size_t i = 0; i < kBlock; ++i) {
    x[i] = state[i];
    x[kBlock + i] = block[i];
    x[2 * kBlock + i] = state[i] ^ block[i];
  }
  unsigned char carry = 0;
  for (int round = 0; round < kRounds; ++round) {
    for (unsigned char& byte : x) carry = byte ^= kPi[carry];
    carry = static_cast<unsigned char>(carry + round);
  }
  std::memcpy(state, x, kBlock);

  unsigned char last = checksum[kBlock - 1];
  for (size_t i = 0; i < kBlock; ++i) last = checksum[i] ^= kPi[block[i] ^ last];
}

}  // namespace

Md2Digest Md2(std::span<const unsigned char> message) {
  Md2Digest state{};
  unsigned char checksum[kBlock] = {};
  while (message.size() >= kBlock) {
    Transform(message.data(), state.data(), checksum);
    message = message.subspan(kBlock);
  }
  unsigned char tail[kBlock];
  std::memset(tail, static_cast<int>(kBlock - message.size()), kBlock);
  std::copy(message.begin(), message.end(), tail);
  Transform(tail, state.data(), checksum);
  unsigned char appended[kBlock];
  std::memcpy(appended, checksum, kBlock);
  Transform(appended, state.data(), checksum);
  return state;
}

Md2Digest HmacMd2(std::span<const unsigned char> key, std::span<const unsigned char> message) {
  unsigned char padded[kBlock] = {};
  if (key.size() > kBlock) {
    const Md2Digest hashed = Md2(key);
    std::copy(hashed.begin(), hashed.end(), padded);
  } else {
    std::copy(key.begin(), key.end(), padded);
  }
  std::vector<unsigned char> inner(kBlock);
  std::vector<unsigned char> outer(kBlock);
  for (size_t i = 0; i < kBlock; ++i) {
    inner[i] = padded[i] ^ 0x36;
    outer[i] = padded[i] ^ 0x5c;
  }
  inner.insert(inner.end(), message.begin(), message.end());
  const Md2Digest digest = Md2(inner);
  outer.insert(outer.end(), digest.begin(), digest.end());
  return Md2(outer);
}

}  // namespace penstock::interop
