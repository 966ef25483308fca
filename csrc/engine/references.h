// What keeps an allocated cache alive: its id, and the keys of its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "model/cache_key.h"
#include "model/layer_range.h"

namespace llmdd {

// Not synchronised: the cache table's mutex guards it.
class References {
 public:
  // The id, and one reference for each key that is no placeholder; key i names row i.
  References(size_t num_tensors, const std::vector<RowKey>& keys);

  bool id_held() const { return id_held_; }
  void drop_id() { id_held_ = false; }

  // The key of this row, if it is still bound; nullptr otherwise.
  const RowKey* key_of(uint64_t row) const;
  void drop_row(uint64_t row) { rows_.erase(row); }

  // A peer has pulled these tensors of the row. True when this completes them and the row is named
  // by a request, so that its reference is used up. Each row counts for itself.
  bool pulled(uint64_t row, const TensorRange& tensors);

  bool gone() const { return !id_held_ && rows_.empty(); }

 private:
  struct Row {
    RowKey key;
    std::vector<bool> pulled;  // empty until the first pull of a part
    size_t missing = 0;
  };

  const size_t num_tensors_;
  bool id_held_ = true;
  std::map<uint64_t, Row> rows_;
};

}  // namespace llmdd
