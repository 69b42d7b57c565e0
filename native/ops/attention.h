// Paged attention, one algorithm for prefill and decode.
//
// KV blocks hold 16 tokens. In the pool a block is [layer][kv_head]{ K [head_dim][16], V [16][head_dim] }, so that all
// layers of a block are contiguous (one zeroing, one export) and all KV heads of a block's layer are contiguous.
// With int8, K and V are each followed by f32 scale[16], one a token; a vector is quantised by itself when it is
// written, and never again: amax = max |x| over its head_dim elements,
//   a NaN or infinity among them: scale = NaN, q = 0;  amax < kTinyBlock (ops/linear.h): scale = 0, q = 0;  else
//   scale = amax / 127,  q = x * (127 / amax) rounded to nearest even
//
// Canonical order for one query row at position p and one query head:
//   q'[d] = q[d] * scale
//   tokens 0..p, taken in whole blocks of 16 (tokens past p, and before p - window + 1, are masked); blocks past the
//   query's own are never read. Spans are 64 tokens, segments 1,024, both at absolute positions.
//   score[t] = FMA chain over d in increasing order, from +0; int8: of q'[d] * float(q), then score * K's scale[t];
//            soft cap c > 0: score = c * tanh_(score / c)
//   span:    m' = max(m, max of the span's unmasked scores); e[t] = exp_(score[t] - m'), masked: exactly +0
//            sum = 16 partial sums (token t to t mod 16, in order), then the tree (i + i+8, i + i+4, i + i+2, i + i+1)
//            a = exp_(m - m');  l = fma(l, a, sum);  o[d] = o[d] * a, then o[d] = fma(e[t], V[t][d], o[d]) for t in
//            order (a span with no unmasked token is skipped; a segment starts with m = -inf, l = 0, o = 0)
//            int8: e[t] * V's scale[t] takes the place of e[t] in o, but not in l, and float(q) that of V[t][d]
//   segments in order: the first with an unmasked token is taken as it is; then m' = max(M, m), A = exp_(M - m'),
//            B = exp_(m - m'), L = fma(L, A, l * B), O[d] = fma(O[d], A, o[d] * B)
//   out[d] = O[d] / L
//
// Cascade: rows of several sequences whose tables begin with the same blocks share an item, and a span that lies wholly
// in those blocks is read once for all of them. It only exchanges loops: each row keeps its own state and its order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

enum class KVType : std::uint8_t { F16, F32, Int8 };

inline constexpr std::int64_t kBlockTokens = 16;
inline constexpr std::int64_t kSpanTokens = 64;
inline constexpr std::int64_t kSegmentTokens = 1024;

struct KVLayout {
  std::int64_t layers = 0, kv_heads = 0, head_dim = 0;
  KVType type = KVType::F16;
  std::int64_t element_bytes() const { return type == KVType::F16 ? 2 : type == KVType::F32 ? 4 : 1; }
  std::int64_t data_bytes() const { return head_dim * kBlockTokens * element_bytes(); }  // of K, and of V
  std::int64_t scale_bytes() const { return type == KVType::Int8 ? kBlockTokens * 4 : 0; }
  std::int64_t head_bytes() const { return 2 * (data_bytes() + scale_bytes()); }  // K then V
  std::int64_t layer_bytes() const { return kv_heads * head_bytes(); }
  std::int64_t block_bytes() const { return layers * layer_bytes(); }
};

struct SequenceRows {
  std::int64_t row_begin = 0, row_end = 0;    // rows of the batch; positions are consecutive
  std::int64_t first_position = 0;            // absolute position of row_begin
  const std::int32_t* block_table = nullptr;  // block ids, covers positions 0 .. last
};

// One query row with what its item needs to know of it, in the order of the plan.
struct AttentionRow {
  std::int64_t row = 0;                       // of the batch: of q and out
  std::int64_t position = 0;                  // absolute
  const std::int32_t* block_table = nullptr;  // covers positions 0 .. position
  // Leading tokens that lie in the same blocks of memory as those of the row before this one in the plan, whole blocks
  // only; kAllShared when both are of one sequence. Rows a .. b share what the rows a + 1 .. b all share.
  std::int64_t shared = 0;
};
inline constexpr std::int64_t kAllShared = std::int64_t{1} << 62;

struct AttentionJob {
  const float* q = nullptr;  // [rows][q_stride], heads * head_dim columns
  std::int64_t q_stride = 0;
  float* out = nullptr;  // [rows][out_stride], heads * head_dim columns
  std::int64_t out_stride = 0;
  const std::byte* pool = nullptr;
  KVLayout layout;
  std::int64_t layer = 0;
  std::int64_t heads = 0;  // query heads; heads % kv_heads == 0
  float scale = 1.0f;
  std::int64_t window = 0;  // 0: none; else only the last `window` tokens, the query's own included
  float soft_cap = 0.0f;    // 0: none
  const SequenceRows* sequences = nullptr;
  std::int64_t sequence_count = 0;
  const AttentionRow* rows = nullptr;  // plan.rows
  float* partials = nullptr;           // [plan.partial_floats]
};

// One piece of work: some rows of the plan, one KV head with its group of query heads, some segments. Items are
// independent; any thread may take any item.
struct AttentionItem {
  std::int64_t row_begin = 0, row_end = 0, kv_head = 0;  // rows: indices of plan.rows
  std::int64_t segment_begin = 0, segment_end = 0;       // the end is that of the row with most segments
  // Negative: the item has all segments of its rows, merges them itself and writes `out`. Else it has one segment and
  // this is the index of its first partial; a partial is {m, l, o[head_dim]}, ordered [row][head of the group].
  // The partials of rows that end before that segment mean nothing.
  std::int64_t partial = -1;
};

// The rows of the plan and the KV head whose segments were given to different items, and where their partials are:
// (segment, row, head of the group) is at index partial + (segment * rows + row - row_begin) * group + head.
struct AttentionMerge {
  std::int64_t row_begin = 0, row_end = 0, kv_head = 0, partial = 0;
};

struct AttentionScratch {  // one a thread, kept between items
  std::vector<float> buffer;
};

struct AttentionPlan {
  std::vector<AttentionRow> rows;      // each row of the batch once; neighbours share as much as can be
  std::vector<AttentionItem> items;    // the dearest first, so that threads that take the next one finish together
  std::vector<AttentionMerge> merges;  // empty: no merge phase is needed
  std::size_t partial_floats = 0;      // what AttentionJob::partials must hold
};
// Cuts a step's attention into items; the bits of the result are the same for every cut. Reads only sequences, heads,
// kv_heads and head_dim, so one plan serves every layer of a step, whatever its q, out, window, scale or soft cap.
// Without `cascade` no item has rows of two sequences.
AttentionPlan attention_plan(const AttentionJob& job, int threads, bool cascade = true);
// After all items, when plan.merges is not empty: Kernels::attention_merge(job, plan, row_begin, row_end) merges the
// segments of those rows of the plan, in order, into `out`. Rows can be shared out among threads.

// Floats, 64-byte aligned, from the scratch; what an earlier call returned is void. Allocates nothing when the scratch
// has been grown by reserve_attention_scratch for these shapes: threads of a step must not throw.
float* attention_scratch(AttentionScratch& scratch, std::size_t floats);
void reserve_attention_scratch(AttentionScratch& scratch, const KVLayout& layout, std::int64_t heads);
// What an item of so many query vectors needs: three vectors of head_dim, a span of scores and five more floats each,
// the number of vectors rounded up to 16.
std::size_t attention_scratch_floats(std::int64_t vectors, std::int64_t head_dim);

// Writes rows [row_begin, row_end) of k and v ([rows][stride], kv_heads * head_dim columns) to their blocks, rounded to
// the KV type (round to nearest even). finite[r] is cleared when a stored value is not finite (fp16 overflow included);
// with int8 that is a scale.
struct KVStoreJob {
  const float* k = nullptr;
  const float* v = nullptr;
  std::int64_t stride = 0;
  std::byte* pool = nullptr;
  KVLayout layout;
  std::int64_t layer = 0;
  const SequenceRows* sequences = nullptr;
  std::int64_t sequence_count = 0;
  std::uint8_t* finite = nullptr;  // [rows]
};

}  // namespace octavo
