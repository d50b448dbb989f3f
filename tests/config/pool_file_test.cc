#include "config/pool_file.h"

#include <stdlib.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>

#include "config/toml_reader.h"

using namespace penstock;
using namespace penstock::config;

namespace {

// A pool file with this text, for the time of a test.
class Written {
 public:
  explicit Written(const std::string& text) {
    char folder[] = "/tmp/pool-file-XXXXXX";
    folder_ = mkdtemp(folder);
    path_ = folder_ + "/pool.toml";
    std::ofstream(path_) << text;
  }
  ~Written() {
    unlink(path_.c_str());
    rmdir(folder_.c_str());
  }
  const std::string& path() const { return path_; }
  const std::string& folder() const { return folder_; }

 private:
  std::string folder_, path_;
};

// What reading it complains of, without the path in front.
std::string Complaint(const std::string& text) {
  const Written file(text);
  const auto read = ReadPoolFile(file.path());
  if (read) return "";
  const std::string& message = read.error().message;
  return message.compare(0, file.path().size(), file.path()) == 0
             ? message.substr(file.path().size())
             : message;
}

}  // namespace

TEST_CASE("a pool file says where servers are and how they share", "[config]") {
  const Written file(R"(
key-file = "common"
transport = "tcp"
[[server]]
address = "gpu7:14833"
[[server]]
name = "big"
address = "[2001:db8::1]:99"
key-file = "/etc/its-own"
transport = "rdma"
gpus = [3, 1]
slots-per-gpu = 4
memory-per-slot = "1536 MiB"
)");
  const auto pool = ReadPoolFile(file.path());
  REQUIRE(pool);
  REQUIRE(pool->servers.size() == 2);
  const PoolServer& first = pool->servers[0];
  CHECK(first.name == "gpu7");
  CHECK(first.key_file == file.folder() + "/common");
  CHECK(first.transport == "tcp");
  CHECK_FALSE(first.size.given);
  CHECK(first.size.gpus.empty());
  const PoolServer& second = pool->servers[1];
  CHECK(second.name == "big");
  CHECK(second.address == "[2001:db8::1]:99");
  CHECK(second.key_file == "/etc/its-own");
  CHECK(second.transport == "rdma");
  CHECK(second.size.given);
  CHECK(second.size.gpus == std::vector<uint32_t>{3, 1});
  CHECK(second.size.slots_per_gpu == 4);
  CHECK(second.size.memory_per_slot == 3ull << 29);
}

TEST_CASE("what is wrong in a pool file is said with its line", "[config]") {
  CHECK(Complaint("") == ": The pool has no [[server]].");
  CHECK(Complaint("keyfile = 'x'\n[[server]]\naddress = 'a:1'\n") ==
        ":1: Key (keyfile) is not known.");
  CHECK(Complaint("[[server]]\naddress = 'a:1'\nslots = 2\n") == ":3: Key (slots) is not known.");
  CHECK(Complaint("[[server]]\nname = 'a'\n") == ":1: The server has no address.");
  CHECK(Complaint("[[server]]\naddress = 'a'\n") ==
        ":2: The server (a) is not of the form HOST:PORT.");
  CHECK(Complaint("[[server]]\naddress = 'a:1'\n[[server]]\naddress = 'a:2'\n") ==
        ":3: There are two servers of the name (a).");
  CHECK(Complaint("[[server]]\naddress = 'a:1'\n[[server]]\nname = 'b'\naddress = 'a:1'\n") ==
        ":5: There are two servers of the address (a:1).");
  CHECK(Complaint("[[server]]\naddress = 'a:1'\ntransport = 'udp'\n") ==
        ":3: Value of transport (udp) is none of auto, shm, rdma and tcp.");
  CHECK(Complaint("transport = 'udp'\n[[server]]\naddress = 'a:1'\n") ==
        ":1: Value of transport (udp) is none of auto, shm, rdma and tcp.");
  CHECK(Complaint("[[server]]\naddress = 'a:1'\nslots-per-gpu = 0\n") ==
        ":3: Value of slots-per-gpu is 0; there is at least one slot.");
  CHECK(Complaint("[[server]]\naddress = 'a:1'\ngpus = [0, -1]\n") ==
        ":3: Value of gpus is not a list of numbers.");
  CHECK(Complaint("[[server]]\naddress = 'a:1'\nmemory-per-slot = 5\n") ==
        ":3: Value of memory-per-slot is not a size such as \"512 MiB\" or \"8 GiB\".");
  CHECK(Complaint("[server]\naddress = 'a:1'\n") ==
        ":1: Value of server is not a list of sections.");
  CHECK(Complaint("[[server]\n").substr(0, 3) == ":1:");
  CHECK(ReadPoolFile("/nowhere/pool.toml").error().code == Code::kSystem);
}

TEST_CASE("sizes have units", "[config]") {
  uint64_t bytes = 0;
  CHECK(ParseSize("512 MiB", &bytes));
  CHECK(bytes == 512ull << 20);
  CHECK(ParseSize("8GiB", &bytes));
  CHECK(bytes == 8ull << 30);
  CHECK(ParseSize("1000", &bytes));
  CHECK(bytes == 1000);
  CHECK_FALSE(ParseSize("0", &bytes));
  CHECK_FALSE(ParseSize("much", &bytes));
  CHECK_FALSE(ParseSize("-1 GiB", &bytes));
}

TEST_CASE("the pool file is looked for where people expect it", "[config]") {
  const Written file("[[server]]\naddress = 'a:1'\n");
  setenv("PENSTOCK_CONFIG", "/named/by/hand.toml", 1);
  CHECK(FindPoolFile() == "/named/by/hand.toml");
  unsetenv("PENSTOCK_CONFIG");
  // In the folder of settings it has a folder of its own.
  setenv("XDG_CONFIG_HOME", file.folder().c_str(), 1);
  CHECK(FindPoolFile() != file.path());
  const std::string own = file.folder() + "/penstock";
  REQUIRE(system(("mkdir " + own + " && cp " + file.path() + " " + own).c_str()) == 0);
  CHECK(FindPoolFile() == own + "/pool.toml");
  unsetenv("XDG_CONFIG_HOME");
  REQUIRE(system(("rm -r " + own).c_str()) == 0);
}
