// Blocks this process has set aside for pushes that carry a token (an extension of the API).
//
// A reservation is opened before a peer learns its token, and names its blocks by position. Once
// `close` has returned, no push that carries the token changes a byte any more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/cache_table.h"

namespace llmdd {

struct Reservation {
  std::shared_ptr<Cache> cache;
  std::vector<uint64_t> blocks;
  std::atomic<bool> closed{false};
  int users = 0;  // guarded by the table's mutex

  // Throws Error(kKvCacheNotExist) once `close` was called: a copy has to stop.
  void check_open() const;
};

class ReservationTable;

// Keeps `close` waiting while the reservation's blocks are written.
class ReservationUse {
 public:
  ReservationUse(ReservationTable& table, std::shared_ptr<Reservation> reservation);
  ReservationUse(const ReservationUse&) = delete;
  ReservationUse& operator=(const ReservationUse&) = delete;
  ~ReservationUse();

  const Reservation& operator*() const { return *reservation_; }
  const Reservation* operator->() const { return reservation_.get(); }

 private:
  ReservationTable& table_;
  std::shared_ptr<Reservation> reservation_;
};

class ReservationTable {
 public:
  // Tokens are random and never 0. Throws Error(kParamInvalid) for a contiguous cache, an empty
  // list or a block that the cache does not have.
  uint64_t open(std::shared_ptr<Cache> cache, std::vector<uint64_t> blocks);

  // An unknown token is no error. Returns when no copy for the reservation runs any more.
  void close(uint64_t token);

  // Throws Error(kKvCacheNotExist) for a token that is unknown or closed.
  std::shared_ptr<Reservation> get(uint64_t token);

 private:
  friend class ReservationUse;
  void release(Reservation& reservation);

  std::mutex mutex_;
  std::condition_variable released_;
  std::map<uint64_t, std::shared_ptr<Reservation>> reservations_;
};

}  // namespace llmdd
