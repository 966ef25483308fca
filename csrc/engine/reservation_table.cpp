#include "engine/reservation_table.h"

#include <cstring>

#include "common/random.h"
#include "common/status.h"
#include "model/block_runs.h"

namespace llmdd {
namespace {

[[noreturn]] void throw_closed() {
  throw Error(Status::kKvCacheNotExist, "the reservation of this token is not open");
}

// 63 bits, so that the token fits a signed field wherever it is stored.
uint64_t random_token() {
  Nonce nonce = random_nonce();
  uint64_t token = 0;
  std::memcpy(&token, nonce.data(), sizeof(token));
  return token >> 1;
}

}  // namespace

void Reservation::check_open() const {
  if (closed) throw_closed();
}

ReservationUse::ReservationUse(ReservationTable& table, std::shared_ptr<Reservation> reservation)
    : table_(table), reservation_(std::move(reservation)) {
  std::lock_guard lock(table_.mutex_);
  reservation_->check_open();
  ++reservation_->users;
}

ReservationUse::~ReservationUse() { table_.release(*reservation_); }

uint64_t ReservationTable::open(std::shared_ptr<Cache> cache, std::vector<uint64_t> blocks) {
  if (!cache->layout.is_blocks || blocks.empty()) {
    throw Error(Status::kParamInvalid, "a reservation needs blocks of a blocks cache");
  }
  check_indices(blocks, cache->layout.rows, "reserved");
  auto reservation = std::make_shared<Reservation>();
  reservation->cache = std::move(cache);
  reservation->blocks = std::move(blocks);
  std::lock_guard lock(mutex_);
  uint64_t token = random_token();
  while (token == 0 || reservations_.count(token) != 0) token = random_token();
  reservations_.emplace(token, std::move(reservation));
  return token;
}

void ReservationTable::close(uint64_t token) {
  std::unique_lock lock(mutex_);
  auto found = reservations_.find(token);
  if (found == reservations_.end()) return;
  std::shared_ptr<Reservation> reservation = found->second;
  reservation->closed = true;
  reservations_.erase(found);
  released_.wait(lock, [&reservation] { return reservation->users == 0; });
}

std::shared_ptr<Reservation> ReservationTable::get(uint64_t token) {
  std::lock_guard lock(mutex_);
  auto found = reservations_.find(token);
  if (found == reservations_.end()) throw_closed();
  return found->second;
}

void ReservationTable::release(Reservation& reservation) {
  std::lock_guard lock(mutex_);
  if (--reservation.users == 0) released_.notify_all();
}

}  // namespace llmdd
