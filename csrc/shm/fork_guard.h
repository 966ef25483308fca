// What a forked child sees of memory that its parent shares with peers.
//
// Shared pages are the same in parent and child, so a child that writes "its" memory would write
// the parent's cache. They are therefore left out of the child (MADV_DONTFORK), and right after the
// fork it gets private pages of the same file at the same addresses: what it writes is its own;
// what it has not written follows the parent. A child made without fork(3), by a raw clone(2), has
// a hole there instead.
#pragma once

#include <cstdint>
#include <mutex>

namespace llmdd {

// While this lock is held no fork takes place; it guards the list of ranges, too.
std::unique_lock<std::mutex> hold_forks();

// `fd` stays open until the range is removed.
void guard_range(const std::unique_lock<std::mutex>& held, uint64_t addr, uint64_t length,
                 uint64_t offset, int fd);
void unguard_file(const std::unique_lock<std::mutex>& held, int fd);

}  // namespace llmdd
