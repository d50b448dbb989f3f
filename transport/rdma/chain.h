// Lists whose links are in their items, and pools that the items come from: what the bulk engine
// keeps its moves in, so that nothing is allocated for one but when there are more at a time than
// ever before.
#pragma once

#include <cstddef>
#include <deque>

namespace penstock::transport::rdma {

template <typename T>
struct Link {
  T* previous = nullptr;
  T* next = nullptr;
  bool linked = false;
};

// An item is in one chain at a time for each of its links.
template <typename T, Link<T> T::*kLink>
class Chain {
 public:
  bool empty() const { return first_ == nullptr; }
  size_t size() const { return size_; }
  T* first() const { return first_; }
  static T* After(const T& item) { return (item.*kLink).next; }

  void PushBack(T& item) { Insert(item, last_, nullptr); }
  void PushFront(T& item) { Insert(item, nullptr, first_); }

  void Remove(T& item) {
    Link<T>& link = item.*kLink;
    (link.previous != nullptr ? (link.previous->*kLink).next : first_) = link.next;
    (link.next != nullptr ? (link.next->*kLink).previous : last_) = link.previous;
    link = {};
    --size_;
  }
  T* PopFront() {
    T* item = first_;
    if (item != nullptr) Remove(*item);
    return item;
  }
  T* PopBack() {
    T* item = last_;
    if (item != nullptr) Remove(*item);
    return item;
  }
  // Appends everything of another chain, in its order.
  void TakeAll(Chain& other) {
    while (T* item = other.PopFront()) PushBack(*item);
  }

 private:
  void Insert(T& item, T* previous, T* next) {
    item.*kLink = {previous, next, true};
    (previous != nullptr ? (previous->*kLink).next : first_) = &item;
    (next != nullptr ? (next->*kLink).previous : last_) = &item;
    ++size_;
  }

  T* first_ = nullptr;
  T* last_ = nullptr;
  size_t size_ = 0;
};

template <typename T, Link<T> T::*kLink>
class Pool {
 public:
  // A fresh item, in no chain.
  T& Take() {
    T* item = free_.PopFront();
    if (item == nullptr) return items_.emplace_back();
    *item = T();
    return *item;
  }
  // Back, once it is in no chain.
  void Give(T& item) { free_.PushFront(item); }
  void Prepare(size_t count) {
    while (items_.size() < count) Give(items_.emplace_back());
  }

 private:
  std::deque<T> items_;
  Chain<T, kLink> free_;
};

}  // namespace penstock::transport::rdma
