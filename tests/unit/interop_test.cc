#include <catch2/catch.hpp>

#include <cstring>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "interop/context_storage.h"
#include "interop/export_tables.h"
#include "interop/md2.h"
#include "interop/self_test.h"

namespace {

using namespace penstock::interop;

std::span<const unsigned char> Bytes(std::string_view text) {
  return {reinterpret_cast<const unsigned char*>(text.data()), text.size()};
}

std::string Hex(const Md2Digest& digest) {
  std::string text;
  for (unsigned char byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

CUcontext Context(uintptr_t value) {
  return reinterpret_cast<CUcontext>(value);
}

thread_local CUcontext t_current = nullptr;

Host TestHost() {
  Host host{};
  host.primary_context = [](CUdevice device, CUcontext* context) {
    *context = Context(0x1000 + static_cast<uintptr_t>(device));
    return CUDA_SUCCESS;
  };
  host.current_context = [] { return t_current; };
  host.driver_version = [] { return 13000; };
  host.device_count = [] { return 1; };
  host.device_identity = [](int, DeviceIdentity* identity) {
    std::memset(identity->uuid, 7, sizeof(identity->uuid));
    identity->pci_bus = 3;
    return CUDA_SUCCESS;
  };
  host.context_id = [](CUcontext, unsigned long long* id) {
    *id = 42;
    return CUDA_SUCCESS;
  };
  host.stream_id = [](CUcontext, CUstream stream, unsigned long long* id) {
    *id = reinterpret_cast<unsigned long long>(stream) + 100;
    return CUDA_SUCCESS;
  };
  host.enumerate_functions = [](CUmodule, void (*visit)(void*, CUfunction), void* user) {
    visit(user, reinterpret_cast<CUfunction>(1));
    visit(user, reinterpret_cast<CUfunction>(2));
    return CUDA_SUCCESS;
  };
  return host;
}

const void* const* Table(std::initializer_list<unsigned char> id) {
  SetHost(TestHost());
  CUuuid uuid;
  REQUIRE(id.size() == sizeof(uuid.bytes));
  std::copy(id.begin(), id.end(), reinterpret_cast<unsigned char*>(uuid.bytes));
  const void* table = nullptr;
  REQUIRE(GetExportTable(&table, &uuid) == CUDA_SUCCESS);
  return static_cast<const void* const*>(table);
}

}  // namespace

TEST_CASE("MD2 gives the digests of RFC 1319", "[interop]") {
  CHECK(Hex(Md2(Bytes(""))) == "8350e5a3e24c153df2275c9f80692773");
  CHECK(Hex(Md2(Bytes("a"))) == "32ec01ec4a6dac72c0ab96fb34c0b5d1");
  CHECK(Hex(Md2(Bytes("abc"))) == "da853b0d3f88d99b30283a69e6ded6bb");
  CHECK(Hex(Md2(Bytes("message digest"))) == "ab4f496bfb2a530b219ff33031fe06b0");
  CHECK(Hex(Md2(Bytes("abcdefghijklmnopqrstuvwxyz"))) == "4e8ddff3650292ab5a4108c3aa47940b");
  CHECK(Hex(Md2(Bytes("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"))) ==
        "da33def2a42df13975352846c30338cd");
  CHECK(Hex(Md2(Bytes("1234567890123456789012345678901234567890"
                      "1234567890123456789012345678901234567890"))) ==
        "d5976f79d83d3a0dc9806c3c66f3efd8");
}

TEST_CASE("HMAC hashes the padded key twice", "[interop]") {
  const std::string key = "0123456789";
  std::string inner(16, '\x36');
  std::string outer(16, '\x5c');
  for (size_t i = 0; i < key.size(); ++i) {
    inner[i] ^= key[i];
    outer[i] ^= key[i];
  }
  const Md2Digest digest = Md2(Bytes(inner + "text"));
  outer.append(digest.begin(), digest.end());
  CHECK(HmacMd2(Bytes(key), Bytes("text")) == Md2(Bytes(outer)));

  const std::string long_key(40, 'k');
  const Md2Digest short_key = Md2(Bytes(long_key));
  CHECK(HmacMd2(Bytes(long_key), Bytes("text")) == HmacMd2(short_key, Bytes("text")));
}

TEST_CASE("the self-test's answer depends on every input", "[interop]") {
  SelfTestInput input;
  input.driver_version = 13000;
  input.version = 13002;
  input.process_id = 1;
  const std::vector<DeviceIdentity> devices(1);
  auto answer = [](const SelfTestInput& i, const std::vector<DeviceIdentity>& d) {
    std::vector<unsigned char> bytes(16);
    SelfTestAnswer(i, d, bytes.data());
    return bytes;
  };
  const auto base = answer(input, devices);
  CHECK(base != std::vector<unsigned char>(16, 0));
  CHECK(answer(input, devices) == base);
  SelfTestInput other = input;
  other.process_id = 2;
  CHECK(answer(other, devices) != base);
  other = input;
  other.unix_seconds = 9;
  CHECK(answer(other, devices) != base);
  std::vector<DeviceIdentity> moved = devices;
  moved[0].pci_device = 1;
  CHECK(answer(input, moved) != base);
  other = input;
  other.version = 13001;
  CHECK(answer(other, devices) == std::vector<unsigned char>(16, 0));
}

TEST_CASE("an unknown export table is refused", "[interop]") {
  const CUuuid id = {};
  const void* table = &id;
  CHECK(GetExportTable(&table, &id) == CUDA_ERROR_INVALID_VALUE);
  CHECK(table == nullptr);
  CHECK(GetExportTable(nullptr, &id) == CUDA_ERROR_INVALID_VALUE);
}

TEST_CASE("CUDART_INTERFACE gives the primary context's handle", "[interop]") {
  const void* const* table = Table({0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87,
                                    0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9});
  CHECK(reinterpret_cast<size_t>(table[0]) == 13 * sizeof(void*));
  CUcontext context = nullptr;
  const auto primary =
      reinterpret_cast<CUresult (*)(CUcontext*, CUdevice)>(reinterpret_cast<uintptr_t>(table[2]));
  CHECK(primary(&context, 3) == CUDA_SUCCESS);
  CHECK(context == Context(0x1003));
  const auto unused = reinterpret_cast<CUresult (*)()>(reinterpret_cast<uintptr_t>(table[5]));
  CHECK(unused() == CUDA_ERROR_NOT_SUPPORTED);
}

TEST_CASE("module queries visit every function", "[interop]") {
  const void* const* table = Table({0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c,
                                    0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e});
  using Callback = void (*)(void*, CUfunction, void*);
  const auto enumerate = reinterpret_cast<uint64_t (*)(CUcontext, CUmodule, Callback, void*)>(
      reinterpret_cast<uintptr_t>(table[7]));
  int sum = 0;
  const Callback add = [](void* user, CUfunction function, void*) {
    *static_cast<int*>(user) += static_cast<int>(reinterpret_cast<uintptr_t>(function));
  };
  CHECK(enumerate(nullptr, nullptr, add, &sum) != 0);
  CHECK(sum == 3);
}

TEST_CASE("context storage is found from every thread until it is dropped", "[interop]") {
  int key = 0;
  int value = 0;
  void* found = nullptr;
  CHECK(StorageGet(Context(1), &key, &found) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(StoragePut(Context(1), &key, &value, nullptr) == CUDA_SUCCESS);
  CHECK(StorageGet(Context(1), &key, &found) == CUDA_SUCCESS);
  CHECK(found == &value);
  void* other_thread = nullptr;
  std::thread([&] { StorageGet(Context(1), &key, &other_thread); }).join();
  CHECK(other_thread == &value);
  CHECK(StorageGet(Context(2), &key, &found) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(StorageDelete(Context(1), &key) == CUDA_SUCCESS);
  CHECK(StorageGet(Context(1), &key, &found) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(StorageDelete(Context(1), &key) == CUDA_ERROR_INVALID_HANDLE);
}

TEST_CASE("dropping a context runs the destructors of its values only", "[interop]") {
  int keys[3] = {};
  int mine = 0;
  int other = 0;
  const StorageDestructor count = [](CUcontext context, void* key, void* value) {
    // A destructor may use the storage: the runtime deletes its own key here.
    StorageDelete(context, key);
    ++*static_cast<int*>(value);
  };
  StoragePut(Context(10), &keys[0], &mine, count);
  StoragePut(Context(10), &keys[1], &mine, count);
  StoragePut(Context(11), &keys[2], &other, count);
  DropContext(Context(10));
  CHECK(mine == 2);
  CHECK(other == 0);
  void* found = nullptr;
  CHECK(StorageGet(Context(10), &keys[0], &found) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(StorageGet(Context(11), &keys[2], &found) == CUDA_SUCCESS);
  DropContext(Context(11));
  CHECK(other == 1);
}

TEST_CASE("a null context means the thread's current one", "[interop]") {
  const void* const* table = Table({0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3,
                                    0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93});
  const auto put = reinterpret_cast<CUresult (*)(CUcontext, void*, void*, StorageDestructor)>(
      reinterpret_cast<uintptr_t>(table[0]));
  const auto get = reinterpret_cast<CUresult (*)(void**, CUcontext, void*)>(
      reinterpret_cast<uintptr_t>(table[2]));
  int key = 0;
  int value = 0;
  void* found = nullptr;
  t_current = nullptr;
  CHECK(get(&found, nullptr, &key) == CUDA_ERROR_INVALID_HANDLE);
  CHECK(put(nullptr, &key, &value, nullptr) == CUDA_ERROR_INVALID_CONTEXT);
  t_current = Context(20);
  CHECK(put(nullptr, &key, &value, nullptr) == CUDA_SUCCESS);
  CHECK(get(&found, nullptr, &key) == CUDA_SUCCESS);
  CHECK(found == &value);
  CHECK(get(&found, Context(20), &key) == CUDA_SUCCESS);
  t_current = nullptr;
}
