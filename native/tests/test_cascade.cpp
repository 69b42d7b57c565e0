// Cascade: sequences that share blocks read them once, and every row has the bits it has over blocks of its own.
#include "tests/attention_world.h"

using namespace octavo;
using world::Shape;
using world::Span;
using world::World;

namespace {

// A sequence whose first `blocks` blocks are those of an earlier one.
struct Prefix {
  std::size_t of;
  std::int64_t blocks;
};

struct Member {
  Span span;
  Prefix prefix;
};

// A world in which every token not in a prefix is another in every sequence. `share`: prefixes lie in the same blocks
// of memory, else in copies.
struct Shared : World {
  Shared(const Shape& shape, KVType type, const std::vector<Member>& members, bool share)
      : World(shape, type, spans_of(members)) {
    for (std::size_t s = 0; s < members.size(); ++s) {
      Rng rng{1000 + s};
      for (float& x : k[s]) x = rng.uniform(-1.5f, 1.5f);
      for (float& x : v[s]) x = rng.uniform(-1.0f, 1.0f);
      const auto& [of, blocks] = members[s].prefix;
      std::copy_n(k[of].begin(), blocks * kBlockTokens * width(), k[s].begin());
      std::copy_n(v[of].begin(), blocks * kBlockTokens * width(), v[s].begin());
      if (share) std::copy_n(tables[of].begin(), blocks, tables[s].begin());
    }
    Rng rng{5};
    for (float& x : q) x = rng.uniform(-2.0f, 2.0f);
    store(*find_kernels("auto"));
  }
  static std::vector<Span> spans_of(const std::vector<Member>& members) {
    std::vector<Span> spans;
    for (const Member& m : members) spans.push_back(m.span);
    return spans;
  }
};

const KVType kTypes[] = {KVType::F16, KVType::F32, KVType::Int8};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Whole, half and no spans shared; a system prompt with two prefixes below it; a sequence that is another's prefix;
// equal tables; chunks; a chain in which each shares more with the next.
const std::vector<std::vector<Member>> kBatches = {
    {{{200, 1}, {0, 0}}, {{210, 1}, {0, 12}}, {{230, 1}, {0, 12}}, {{199, 1}, {0, 12}}, {{193, 1}, {0, 12}}},
    {{{300, 1}, {0, 0}},
     {{290, 1}, {0, 5}},
     {{130, 1}, {0, 3}},
     {{70, 1}, {0, 1}},
     {{64, 1}, {0, 4}},
     {{9, 1}, {0, 0}}},
    {{{400, 1}, {0, 0}},
     {{350, 1}, {0, 8}},
     {{340, 1}, {1, 20}},
     {{390, 1}, {0, 20}},
     {{333, 1}, {1, 16}},
     {{120, 1}, {0, 0}},
     {{270, 1}, {0, 16}},
     {{129, 1}, {0, 8}}},
    {{{191, 1}, {0, 0}}, {{95, 1}, {0, 6}}, {{191, 1}, {0, 12}}, {{127, 1}, {0, 8}}},
    {{{130, 40}, {0, 0}}, {{128, 3}, {0, 8}}, {{150, 1}, {0, 8}}, {{64, 9}, {0, 4}}, {{0, 20}, {0, 0}}},
    {{{64, 1}, {0, 0}}, {{128, 1}, {0, 4}}, {{192, 1}, {1, 8}}, {{256, 1}, {2, 12}}, {{320, 1}, {3, 16}}},
};
// Segments: prefixes that end in, at and behind them, and sequences of one to four.
const std::vector<Member> kLong = {{{3100, 1}, {0, 0}},  {{2100, 1}, {0, 125}}, {{2047, 2}, {0, 127}},
                                   {{1023, 1}, {0, 63}}, {{1024, 1}, {0, 64}},  {{1100, 1}, {1, 60}}};

// Every plan over shared blocks against one item a row over copies of them.
void check_batch(const Shape& shape, KVType type, const std::vector<Member>& members) {
  Shared own(shape, type, members, false), shared(shape, type, members, true);
  const bool is_long = members[0].span.first > 1000;
  const struct {
    std::int64_t window;
    float soft_cap;
  } variants[] = {{0, 0.0f}, {is_long ? 1030 : 100, 3.0f}, {is_long ? 300 : 20, 0.0f}};
  for (const auto& variant : variants) {
    for (World* w : {static_cast<World*>(&own), static_cast<World*>(&shared)}) {
      w->job.window = variant.window;
      w->job.soft_cap = variant.soft_cap;
    }
    const std::vector<float> want = own.run(*find_kernels("auto"), own.cut(1, false));
    for (const int threads : {1, 2, 3, 4, 16}) {
      const AttentionPlan plan = attention_plan(shared.job, threads);
      CHECK(same_bits(shared.run(*find_kernels("auto"), plan), want));
      for (const std::string& name : kernel_names()) {
        if (threads != 2 || (name == "scalar" && (is_long || shape.head_dim > 32))) continue;  // slow
        CHECK(same_bits(shared.run(*find_kernels(name), plan), want));
      }
    }
    CHECK(same_bits(own.run(*find_kernels("auto"), attention_plan(own.job, 2)), want));
  }
}

void test_shared_blocks_give_the_bits_of_copies() {
  std::size_t turn = 0;  // each batch meets every type
  for (const Shape& shape : {Shape{1, 1, 8}, Shape{2, 1, 20}, Shape{9, 3, 64}, Shape{4, 1, 32}, Shape{10, 2, 24},
                             Shape{6, 1, 80}, Shape{7, 1, 16}, Shape{8, 1, 128}, Shape{30, 1, 8}}) {
    for (std::size_t b = 0; b < kBatches.size(); ++b) check_batch(shape, kTypes[(turn + b) % 3], kBatches[b]);
    ++turn;
  }
  check_batch({3, 1, 16}, KVType::F16, kLong);
  check_batch({5, 1, 8}, KVType::F32, kLong);
  check_batch({4, 2, 64}, KVType::Int8, kLong);
}

void test_random_batches_give_the_bits_of_copies() {
  Rng rng{2024};
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(rng.next() % static_cast<std::uint64_t>(n));
  };
  int together = 0;  // items with rows of several sequences
  for (int round = 0; round < 100; ++round) {
    const std::int64_t kv_heads = 1 + below(3), longest = round % 10 == 0 ? 2300 : 330;
    const Shape shape{kv_heads * (1 + below(8)), kv_heads, 8 * (1 + below(4))};
    std::vector<Member> members;
    for (std::int64_t s = 0, count = 1 + below(14); s < count; ++s) {
      const Span span{below(longest), below(4) == 0 ? 1 + below(12) : 1};
      const auto of = static_cast<std::size_t>(below(std::max<std::int64_t>(s, 1)));
      std::int64_t blocks = s == 0 ? 0 : std::min(span.first, members[of].span.first) / kBlockTokens;
      if (below(3) == 0) blocks = below(blocks + 1);
      members.push_back({span, {of, blocks}});
    }
    const KVType type = kTypes[below(3)];
    Shared own(shape, type, members, false), shared(shape, type, members, true);
    for (World* w : {static_cast<World*>(&own), static_cast<World*>(&shared)}) {
      w->job.window = round % 3 == 0 ? 1 + round * longest / 100 : 0;
      w->job.soft_cap = round % 4 == 0 ? 2.0f : 0.0f;
    }
    const int threads = static_cast<int>(1 + below(4));
    const std::vector<float> want = own.run(*find_kernels("auto"), own.cut(1, false));
    const AttentionPlan plan = attention_plan(shared.job, threads);
    CHECK(same_bits(shared.run(*find_kernels("auto"), plan), want));
    CHECK(same_bits(shared.run(*find_kernels("auto"), attention_plan(shared.job, threads, false)), want));
    if (longest < 1000) CHECK(same_bits(shared.run(scalar_kernels(), plan), want));
    for (const AttentionItem& item : plan.items) {
      for (std::int64_t r = item.row_begin + 1; r < item.row_end; ++r) {
        together += plan.rows[static_cast<std::size_t>(r)].shared != kAllShared;
      }
    }
  }
  CHECK(together > 500);
}

// The control: rows said to share one span more than they do must differ, or the comparisons above would see nothing.
void test_a_row_said_to_share_too_much_is_seen() {
  const std::vector<Member> members = {{{300, 1}, {0, 0}}, {{300, 1}, {0, 8}}, {{300, 1}, {0, 8}}};
  Shared w({3, 1, 16}, KVType::F16, members, true);
  AttentionPlan plan = attention_plan(w.job, 1);
  const std::vector<float> want = w.run(*find_kernels("auto"), plan);
  CHECK(plan.rows[1].shared == 8 * kBlockTokens);
  plan.rows[1].shared += kSpanTokens;
  if (std::string(find_kernels("auto")->name) != "scalar") {  // which reads each row's own blocks
    CHECK(!same_bits(w.run(*find_kernels("auto"), plan), want));
  }
}

// All but one row of an item get tables whose shared part is poison: who reads it gives NaN.
void test_a_shared_span_is_read_through_one_table() {
  if (std::string(find_kernels("auto")->name) == "scalar") return;  // reads for each row, as the specification may
  std::vector<Member> members(8, Member{{300, 1}, {0, 16}});
  members.push_back({{700, 1}, {0, 0}});  // whose blocks are poisoned
  Shared w({9, 3, 64}, KVType::F16, members, true);
  const std::vector<float> want = w.run(*find_kernels("auto"), attention_plan(w.job, 1));
  AttentionPlan plan = attention_plan(w.job, 1);
  for (const std::int32_t block : w.tables[8]) {
    const std::int64_t bytes = w.layout.block_bytes();
    std::memset(w.pool.data() + block * bytes, 0xff, static_cast<std::size_t>(bytes));
  }
  std::vector<std::vector<std::int32_t>> poisoned(8, w.tables[8]);
  int count = 0;
  for (AttentionRow& row : plan.rows) {
    if (row.row == 8) continue;
    std::vector<std::int32_t>& table = poisoned[static_cast<std::size_t>(row.row)];
    std::copy(row.block_table + 16, row.block_table + 19, table.begin() + 16);
    if (++count % 8 != 0) row.block_table = table.data();
  }
  const std::vector<float> got = w.run(*find_kernels("auto"), plan);
  const std::size_t size = 8 * 9 * 64;
  CHECK(std::memcmp(got.data(), want.data(), size * sizeof(float)) == 0);
  for (const AttentionItem& item : w.cut(1, false).items) {  // the control: rows by themselves read the poison
    if (item.row_begin == 8) continue;
    AttentionScratch scratch;
    AttentionItem one = item;
    w.job.rows = plan.rows.data();
    find_kernels("auto")->attention(w.job, one, scratch);
  }
  int poisoned_rows = 0;
  for (std::size_t r = 0; r < 8; ++r) poisoned_rows += std::isnan(w.out[r * 9 * 64]);
  CHECK(poisoned_rows == 7);
}

// The rows of each item of the first KV head, by sequence.
std::vector<std::vector<std::int64_t>> items_of(const AttentionPlan& plan) {
  std::vector<std::vector<std::int64_t>> found;
  for (const AttentionItem& item : plan.items) {
    if (item.kv_head != 0) continue;
    std::vector<std::int64_t> rows;
    for (std::int64_t r = item.row_begin; r < item.row_end; ++r) {
      rows.push_back(plan.rows[static_cast<std::size_t>(r)].row);
    }
    std::sort(rows.begin(), rows.end());
    found.push_back(rows);
  }
  std::sort(found.begin(), found.end());
  return found;
}

void test_a_plan_puts_those_together_that_share_most() {
  using Rows = std::vector<std::vector<std::int64_t>>;
  std::vector<Member> members = {{{400, 1}, {0, 0}}, {{400, 1}, {0, 0}}};
  for (std::size_t s = 2; s < 12; ++s) members.push_back({{400, 1}, {s % 2, 20}});  // even and odd ones, not adjacent
  Shared two({3, 1, 16}, KVType::F16, members, true);
  CHECK(items_of(attention_plan(two.job, 1)) == (Rows{{0, 2, 4, 6, 8, 10}, {1, 3, 5, 7, 9, 11}}));
  CHECK(attention_plan(two.job, 1, false).items.size() == 12);

  members[1].prefix = {0, 4};  // all share a system prompt: the cut is still where least is shared
  Shared tree({3, 1, 16}, KVType::F16, members, true);
  CHECK(items_of(attention_plan(tree.job, 1)) == (Rows{{0, 2, 4, 6, 8, 10}, {1, 3, 5, 7, 9, 11}}));

  for (Member& m : members) m.prefix.blocks = std::min<std::int64_t>(m.prefix.blocks, 3);  // no whole span
  Shared little({3, 1, 16}, KVType::F16, members, true);
  CHECK(attention_plan(little.job, 1).items.size() == 12);

  std::vector<Member> many(32, Member{{2049, 1}, {0, 125}});
  Shared batch({9, 3, 8}, KVType::F16, many, true);
  for (const int threads : {1, 2, 4, 8}) {
    const AttentionPlan plan = attention_plan(batch.job, threads);
    CHECK(static_cast<int>(plan.items.size()) >= (threads > 1 ? 4 * threads : 12));
    for (const AttentionItem& item : plan.items) CHECK(3 * (item.row_end - item.row_begin) <= 24);
  }
  CHECK(attention_plan(batch.job, 1, false).items.size() == 96);
  std::vector<Member> few(2, Member{{8000, 1}, {0, 400}});  // threads share a long prefix by its segments
  Shared deep({2, 1, 8}, KVType::F16, few, true);
  const AttentionPlan plan = attention_plan(deep.job, 2);
  CHECK(plan.items.size() >= 8 && !plan.merges.empty());
}

}  // namespace

int main() {
  test_shared_blocks_give_the_bits_of_copies();
  test_random_batches_give_the_bits_of_copies();
  test_a_row_said_to_share_too_much_is_seen();
  test_a_shared_span_is_read_through_one_table();
  test_a_plan_puts_those_together_that_share_most();
  return 0;
}
