#include "engine/references.h"

#include <algorithm>

namespace llmdd {

References::References(size_t num_tensors, const std::vector<RowKey>& keys)
    : num_tensors_(num_tensors) {
  for (uint64_t row = 0; row < keys.size(); ++row) {
    if (!keys[row].is_placeholder()) rows_[row] = {keys[row], {}, num_tensors};
  }
}

const RowKey* References::key_of(uint64_t row) const {
  auto found = rows_.find(row);
  return found == rows_.end() ? nullptr : &found->second.key;
}

bool References::pulled(uint64_t row, const TensorRange& tensors) {
  auto found = rows_.find(row);
  if (found == rows_.end() || found->second.key.is_prefix()) return false;
  Row& state = found->second;
  if (state.pulled.empty()) state.pulled.resize(num_tensors_);
  size_t end = std::min(size_t{tensors.first} + tensors.count, num_tensors_);
  for (size_t tensor = tensors.first; tensor < end; ++tensor) {
    if (state.pulled[tensor]) continue;
    state.pulled[tensor] = true;
    --state.missing;
  }
  return state.missing == 0;
}

}  // namespace llmdd
