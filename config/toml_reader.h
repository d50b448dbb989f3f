// Reading a TOML file whose keys are known: what is unknown, or of another type, is an error with
// the file and the line. One reader per section:
//
//   TomlReader reader(path, table);
//   reader.Take("listen", &listen);
//   RETURN_IF_ERROR(reader.Finish());
//
// The first error is kept and comes from Finish(); the targets of later values are left alone.
#pragma once

#include <toml++/toml.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "common/result.h"

namespace penstock::config {

// kInvalidArgument with file and line if it is no TOML; kSystem if it cannot be read.
Result<toml::table> ParseTomlFile(const std::string& path);

// "FILE:LINE: "
std::string PlaceOf(const std::string& path, const toml::source_region& source);

// "256MiB", "8 GiB"; without a unit bytes. Not 0.
bool ParseSize(const std::string& text, uint64_t* bytes);

class TomlReader {
 public:
  // Refers to the table: a copy would not know its place in the file any more. `wins(flag)` says
  // whether the command line has given a value that counts more.
  TomlReader(const std::string& path, const toml::table& table,
             std::function<bool(const char*)> wins = {})
      : path_(path), table_(table), wins_(std::move(wins)) {}

  void Take(const char* name, std::string* target, const char* flag = nullptr);
  void Take(const char* name, uint32_t* target, const char* flag = nullptr);
  void Take(const char* name, uint64_t* target, const char* flag = nullptr);  // a size
  void Take(const char* name, bool* target, const char* flag = nullptr);
  void Take(const char* name, std::vector<std::string>* target);
  void Take(const char* name, std::vector<uint32_t>* target);
  // Empty if the file has no such section.
  const toml::table& TakeTable(const char* name);
  // The sections of that name ([[name]]); empty if there is none.
  std::vector<const toml::table*> TakeTables(const char* name);

  // A value was read that cannot be; it stands at the key.
  void Refuse(const char* name, const std::string& why);
  Status Finish();

 private:
  const toml::node* Node(const char* name, const char* flag);
  void Wrong(const char* name, const toml::node& node, const char* wanted);

  const std::string path_;
  const toml::table& table_;
  const std::function<bool(const char*)> wins_;
  std::set<std::string> known_;
  std::string error_;
};

}  // namespace penstock::config
