// MD2 (RFC 1319) and HMAC over it (RFC 2104, with MD2's block size of 16). The CUDA runtime's
// self-test asks for this digest; it protects nothing, and nothing else may use it.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace penstock::interop {

using Md2Digest = std::array<unsigned char, 16>;

Md2Digest Md2(std::span<const unsigned char> message);
// Keys longer than one block are hashed first, as RFC 2104 says.
Md2Digest HmacMd2(std::span<const unsigned char> key, std::span<const unsigned char> message);

}  // namespace penstock::interop
