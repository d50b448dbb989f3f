// Stands in for libFuzzer's main() where the compiler has none: gives each file of the folders and
// files named on the command line to the fuzzer once. So every build, with every sanitizer, replays
// the corpus. Fails if there was nothing to replay.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  std::vector<fs::path> files;
  for (int i = 1; i < argc; ++i) {
    if (!fs::is_directory(argv[i])) {
      files.emplace_back(argv[i]);
      continue;
    }
    for (const auto& entry : fs::directory_iterator(argv[i])) files.push_back(entry.path());
  }
  for (const fs::path& path : files) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
      fprintf(stderr, "File (%s) cannot be read.\n", path.c_str());
      return 1;
    }
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    // On the heap and of exactly this size, as with libFuzzer.
    const std::vector<uint8_t> input(bytes.begin(), bytes.end());
    fprintf(stderr, "%s (%zu bytes)\n", path.c_str(), input.size());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  fprintf(stderr, "%zu inputs replayed.\n", files.size());
  return files.empty() ? 1 : 0;
}
