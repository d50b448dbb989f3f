#include "config/toml_reader.h"

#include <unistd.h>

#include <CLI/CLI.hpp>

namespace penstock::config {

Result<toml::table> ParseTomlFile(const std::string& path) {
  if (access(path.c_str(), R_OK) != 0) return FailErrno("Cannot read settings (" + path + ")");
  try {
    return toml::parse_file(path);
  } catch (const toml::parse_error& error) {
    return Fail(Code::kInvalidArgument,
                PlaceOf(path, error.source()) + std::string(error.description()));
  }
}

std::string PlaceOf(const std::string& path, const toml::source_region& source) {
  return path + ":" + std::to_string(source.begin.line) + ": ";
}

bool ParseSize(const std::string& text, uint64_t* bytes) {
  std::string number = text;
  try {
    const bool fine = CLI::AsSizeValue(/*kb_is_1000=*/false)(number).empty();
    *bytes = fine ? std::stoull(number) : 0;
  } catch (const std::exception&) {
    return false;
  }
  return *bytes != 0;
}

const toml::node* TomlReader::Node(const char* name, const char* flag) {
  known_.insert(name);
  if (!error_.empty() || (flag != nullptr && wins_ && wins_(flag))) return nullptr;
  return table_.get(name);
}

void TomlReader::Wrong(const char* name, const toml::node& node, const char* wanted) {
  if (!error_.empty()) return;
  error_ = PlaceOf(path_, node.source()) + "Value of " + name + " is not " + wanted + ".";
}

void TomlReader::Refuse(const char* name, const std::string& why) {
  if (!error_.empty()) return;
  const toml::node* const node = table_.get(name);
  error_ = PlaceOf(path_, node == nullptr ? table_.source() : node->source()) + why;
}

void TomlReader::Take(const char* name, std::string* target, const char* flag) {
  const toml::node* const node = Node(name, flag);
  if (node == nullptr) return;
  auto value = node->value_exact<std::string>();
  if (!value) return Wrong(name, *node, "text");
  *target = *value;
}

void TomlReader::Take(const char* name, uint32_t* target, const char* flag) {
  const toml::node* const node = Node(name, flag);
  if (node == nullptr) return;
  const auto value = node->value_exact<int64_t>();
  if (!value || *value < 0 || *value > UINT32_MAX) {
    return Wrong(name, *node, "a number from 0 to 4294967295");
  }
  *target = static_cast<uint32_t>(*value);
}

void TomlReader::Take(const char* name, uint64_t* target, const char* flag) {
  const toml::node* const node = Node(name, flag);
  if (node == nullptr) return;
  const auto text = node->value_exact<std::string>();
  if (!text || !ParseSize(*text, target)) {
    Wrong(name, *node, "a size such as \"512 MiB\" or \"8 GiB\"");
  }
}

void TomlReader::Take(const char* name, bool* target, const char* flag) {
  const toml::node* const node = Node(name, flag);
  if (node == nullptr) return;
  const auto value = node->value_exact<bool>();
  if (!value) return Wrong(name, *node, "true or false");
  *target = *value;
}

void TomlReader::Take(const char* name, std::vector<std::string>* target) {
  const toml::node* const node = Node(name, nullptr);
  if (node == nullptr) return;
  if (!node->is_array()) return Wrong(name, *node, "a list of texts");
  target->clear();
  for (const toml::node& each : *node->as_array()) {
    auto value = each.value_exact<std::string>();
    if (!value) return Wrong(name, each, "a list of texts");
    target->push_back(*value);
  }
}

void TomlReader::Take(const char* name, std::vector<uint32_t>* target) {
  const toml::node* const node = Node(name, nullptr);
  if (node == nullptr) return;
  if (!node->is_array()) return Wrong(name, *node, "a list of numbers");
  target->clear();
  for (const toml::node& each : *node->as_array()) {
    const auto value = each.value_exact<int64_t>();
    if (!value || *value < 0 || *value > UINT32_MAX) {
      return Wrong(name, each, "a list of numbers");
    }
    target->push_back(static_cast<uint32_t>(*value));
  }
}

const toml::table& TomlReader::TakeTable(const char* name) {
  static const toml::table kEmpty;
  const toml::node* const node = Node(name, nullptr);
  if (node == nullptr) return kEmpty;
  if (node->is_table()) return *node->as_table();
  Wrong(name, *node, "a section");
  return kEmpty;
}

std::vector<const toml::table*> TomlReader::TakeTables(const char* name) {
  std::vector<const toml::table*> tables;
  const toml::node* const node = Node(name, nullptr);
  if (node == nullptr) return tables;
  if (!node->is_array_of_tables()) {
    Wrong(name, *node, "a list of sections");
    return tables;
  }
  for (const toml::node& each : *node->as_array()) tables.push_back(each.as_table());
  return tables;
}

Status TomlReader::Finish() {
  for (auto&& [key, node] : table_) {
    if (error_.empty() && !known_.contains(std::string(key.str()))) {
      error_ = PlaceOf(path_, key.source()) + "Key (" + std::string(key.str()) + ") is not known.";
    }
  }
  if (!error_.empty()) return Fail(Code::kInvalidArgument, error_);
  return {};
}

}  // namespace penstock::config
