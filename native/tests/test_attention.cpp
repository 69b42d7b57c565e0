// Attention: one set of bits whatever the instruction set, the cut into items, the chunking or the batch.
#include "tests/attention_world.h"

using namespace octavo;
using world::Order;
using world::Shape;
using world::Span;
using world::World;

namespace {

const std::vector<Shape> kShapes = {{1, 1, 8},  {3, 1, 16},  {4, 4, 32},  {9, 3, 64}, {7, 1, 24},
                                    {2, 1, 80}, {4, 2, 128}, {1, 1, 256}, {2, 1, 20}};
const std::vector<Span> kDecode = {{0, 1}, {1, 1}, {15, 1}, {16, 1}, {47, 1}, {63, 1}, {64, 1}, {128, 1}, {191, 1}};
const std::vector<Span> kChunks = {{0, 37}, {50, 20}, {5, 1}, {60, 9}};
const std::vector<Span> kLong = {{1021, 6}, {2047, 2}, {1023, 1}};
const KVType kTypes[] = {KVType::F16, KVType::F32, KVType::Int8};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Calls check(world) for shapes, KV types, batches, windows and soft caps.
template <class Check>
void for_every_world(Check check) {
  for (const Shape& shape : kShapes) {
    for (const KVType type : kTypes) {
      for (const std::vector<Span>* spans : {&kDecode, &kChunks, &kLong}) {
        if (spans == &kLong && (shape.head_dim > 64 || (type != KVType::F16 && shape.heads > 3))) continue;
        World w(shape, type, *spans);
        w.store(scalar_kernels());
        const struct {
          std::int64_t window;
          float soft_cap;
        } variants[] = {{0, 0.0f}, {spans == &kLong ? 1030 : 50, 3.0f}, {spans == &kLong ? 70 : 1, 0.0f}};
        for (const auto& variant : variants) {
          w.job.window = variant.window;
          w.job.soft_cap = variant.soft_cap;
          check(w);
        }
      }
    }
  }
}

template <class Visit>
void for_every_row(const World& w,
                   Visit visit) {  // visit(sequence, position, row, head, out of the scalar table's run)
  for (std::size_t s = 0; s < w.spans.size(); ++s) {
    for (std::int64_t r = 0; r < w.spans[s].rows; ++r) {
      for (std::int64_t h = 0; h < w.job.heads; ++h) visit(s, w.spans[s].first + r, w.sequences[s].row_begin + r, h);
    }
  }
}

void test_every_table_and_every_cut_gives_the_same_bits() {
  for_every_world([](World& w) {
    const std::vector<float> want = w.run(scalar_kernels(), attention_plan(w.job, 1));
    for (const std::string& name : kernel_names()) {
      const Kernels& kernels = *find_kernels(name);
      if (name == "scalar") {  // slow: one cut, and long sequences only below
        if (w.spans[0].first < 1000) CHECK(same_bits(w.run(kernels, w.cut(5, true)), want));
        continue;
      }
      for (const int threads : {1, 2, 16}) CHECK(same_bits(w.run(kernels, attention_plan(w.job, threads)), want));
      for (const std::int64_t rows : {1, 5, 1000}) {
        CHECK(same_bits(w.run(kernels, w.cut(rows, false)), want));
        CHECK(same_bits(w.run(kernels, w.cut(rows, true)), want));
      }
    }
  });
  for (const KVType type : {KVType::F16, KVType::Int8}) {  // the scalar table over segments
    World w({3, 1, 16}, type, kLong);
    w.store(scalar_kernels());
    for (const std::int64_t window : {0, 1030, 70}) {
      w.job.window = window;
      const std::vector<float> want = w.run(scalar_kernels(), w.cut(1000, false));
      CHECK(same_bits(w.run(scalar_kernels(), w.cut(3, true)), want));
    }
  }
}

// The control too: each order that is not ours must differ in bits, or the comparison would see nothing.
void test_bits_are_those_of_the_written_order_and_of_no_other() {
  for (const Shape& shape : {Shape{3, 1, 16}, Shape{9, 3, 64}}) {
    for (const KVType type : {KVType::F16, KVType::Int8}) {
      World w(shape, type, {{0, 3}, {75, 4}, {1500, 1}});
      w.store(scalar_kernels());
      for (const std::int64_t window : {0, 700}) {
        w.job.window = window;
        w.job.soft_cap = window > 0 ? 2.0f : 0.0f;
        const std::vector<float> out = w.run(*find_kernels("auto"), attention_plan(w.job, 2));
        for (const Order order : {Order::Canonical, Order::LinearSum, Order::OneSegment, Order::NormalisedMerge,
                                  Order::LastTokenFirst, Order::ScaledKeys, Order::ScaledSum}) {
          if (type != KVType::Int8 && (order == Order::ScaledKeys || order == Order::ScaledSum)) continue;
          int different = 0;
          for_every_row(w, [&](std::size_t s, std::int64_t position, std::int64_t row, std::int64_t head) {
            const std::vector<float> want = w.reference(s, position, row, head, order);
            const float* got = out.data() + (row * w.job.heads + head) * w.layout.head_dim;
            different += std::memcmp(got, want.data(), want.size() * sizeof(float)) != 0;
          });
          CHECK((order == Order::Canonical) == (different == 0));
        }
      }
    }
  }
}

void test_values_are_near_double_precision() {
  for_every_world([](World& w) {
    if (w.layout.head_dim > 64 && w.layout.type != KVType::F16) return;
    const std::vector<float> out = w.run(*find_kernels("auto"), attention_plan(w.job, 2));
    for_every_row(w, [&](std::size_t s, std::int64_t position, std::int64_t row, std::int64_t head) {
      const std::vector<double> want = w.exact(s, position, row, head);
      const float* got = out.data() + (row * w.job.heads + head) * w.layout.head_dim;
      for (std::size_t d = 0; d < want.size(); ++d) CHECK(std::fabs(static_cast<double>(got[d]) - want[d]) < 2e-6);
    });
  });
}

void test_a_decode_row_gives_the_bits_of_the_same_row_in_a_chunk() {
  for (const KVType type : kTypes) {
    for (const std::int64_t window : {0, 40, 1025}) {
      std::vector<Span> alone;
      for (std::int64_t p = 1000; p < 1045; p += 4) alone.push_back({p, 1});
      alone.push_back({1020, 9});
      World chunk({9, 3, 64}, type, {{990, 60}}), pieces({9, 3, 64}, type, alone);
      for (World* w : {&chunk, &pieces}) {
        w->store(*find_kernels("auto"));
        w->job.window = window;
      }
      const std::vector<float> a = chunk.run(*find_kernels("auto"), attention_plan(chunk.job, 2));
      const std::vector<float> b = pieces.run(*find_kernels("auto"), attention_plan(pieces.job, 2));
      const std::int64_t width = 9 * 64;
      for (std::size_t s = 0; s < alone.size(); ++s) {
        const float* in_chunk = a.data() + (alone[s].first - 990) * width;
        const float* by_itself = b.data() + pieces.sequences[s].row_begin * width;
        CHECK(std::memcmp(in_chunk, by_itself, static_cast<std::size_t>(alone[s].rows * width) * sizeof(float)) == 0);
      }
    }
  }
}

void test_a_reused_block_must_be_zeroed() {
  const std::vector<Span> spans = {{3, 2}, {70, 1}};
  for (const KVType type : kTypes) {
    for (const std::string& name : kernel_names()) {
      const Kernels& kernels = *find_kernels(name);
      World fresh({3, 1, 16}, type, spans), zeroed({3, 1, 16}, type, spans, std::byte{0xff}),
          stale({3, 1, 16}, type, spans, std::byte{0xff});
      std::fill(zeroed.pool.begin(), zeroed.pool.end(), std::byte{0});
      for (World* w : {&fresh, &zeroed, &stale}) w->store(kernels);
      const std::vector<float> want = fresh.run(kernels, attention_plan(fresh.job, 1));
      CHECK(same_bits(zeroed.run(kernels, attention_plan(zeroed.job, 1)), want));
      for (const float x : stale.run(kernels, attention_plan(stale.job, 1))) CHECK(std::isnan(x));  // the control
    }
  }
}

void test_nothing_past_a_querys_own_block_is_read() {
  for (const KVType type : kTypes) {
    for (const std::string& name : kernel_names()) {
      const Kernels& kernels = *find_kernels(name);
      World clean({3, 1, 16}, type, {{0, 80}}), poisoned({3, 1, 16}, type, {{0, 80}});
      for (float& x : poisoned.v[0]) x = &x - poisoned.v[0].data() >= 48 * 16 ? std::nanf("") : x;  // from token 48 on
      for (float& x : poisoned.k[0]) x = &x - poisoned.k[0].data() >= 48 * 16 ? std::nanf("") : x;
      for (World* w : {&clean, &poisoned}) w->store(kernels);
      const std::vector<float> want = clean.run(kernels, clean.cut(24, false)),
                               got = poisoned.run(kernels, poisoned.cut(24, false));
      const std::size_t half = 48 * 48;
      CHECK(std::memcmp(want.data(), got.data(), half * sizeof(float)) == 0);
      for (std::size_t i = half; i < got.size(); ++i) CHECK(std::isnan(got[i]));
    }
  }
}

void test_kv_store_writes_the_same_bytes_and_flags_what_is_not_finite() {
  for (const Shape& shape : kShapes) {
    for (const KVType type : kTypes) {
      const std::int64_t rows = 40;
      World want(shape, type, {{0, rows}});
      // Row 3: overflows fp16 only; 5: the largest that does not; 7: NaN; 9: infinity in v; 11: below fp16's range.
      const auto at = [&](std::vector<float>& x, std::int64_t row) -> float& {
        return x[static_cast<std::size_t>(row * want.width() + want.width() - 1)];
      };
      at(want.k[0], 3) = 65520.0f;
      at(want.v[0], 5) = 65519.0f;
      want.k[0][static_cast<std::size_t>(7 * want.width())] =
          std::nanf("");  // in the first head, the others in the last
      at(want.v[0], 9) = -std::numeric_limits<float>::infinity();
      at(want.k[0], 11) = 1e-9f;
      for (const std::string& name : kernel_names()) {
        World got(shape, type, {{0, rows}});
        got.k = want.k;
        got.v = want.v;
        got.store(*find_kernels(name));
        if (name == "scalar") want.store(scalar_kernels());
        CHECK(got.pool == want.pool);
        for (std::int64_t r = 0; r < rows; ++r) {
          const bool bad = (r == 3 && type == KVType::F16) || r == 7 || r == 9;
          CHECK(got.finite[static_cast<std::size_t>(r)] == (bad ? 0 : 1));
        }
        for (std::int64_t i = 0; i < got.layout.layer_bytes(); ++i)
          CHECK(got.pool[static_cast<std::size_t>(i)] == std::byte{0});  // layer 0
      }
    }
  }
}

void test_int8_is_written_by_the_rules_of_the_layout() {
  for (const std::int64_t head_dim : {8, 20, 64}) {
    for (const std::string& name : kernel_names()) {
      World w({1, 1, head_dim}, KVType::Int8, {{0, 20}});
      const auto n = static_cast<std::size_t>(head_dim);
      for (std::vector<float>* x : {&w.k[0], &w.v[0]}) {
        const auto put = [&](std::size_t token, std::vector<float> first) {
          std::fill_n(x->begin() + static_cast<std::ptrdiff_t>(token * n), n, 0.0f);
          std::copy(first.begin(), first.end(), x->begin() + static_cast<std::ptrdiff_t>(token * n));
        };
        put(17, {-127.0f, 0.5f, 1.5f, -2.5f, 3.49f, 126.5f});
        put(18, {1e-31f, -9e-31f});  // tiny
        put(19, {0.0f, 3e38f, -1e38f});
      }
      w.store(*find_kernels(name));
      const std::byte* head = w.pool.data() + w.tables[0][1] * w.layout.block_bytes() + w.layout.layer_bytes();
      const std::int64_t half = w.layout.head_bytes() / 2, data = w.layout.data_bytes();
      CHECK(data == 16 * head_dim && half == data + 64);
      for (const bool values : {false, true}) {
        const std::byte* base = head + (values ? half : 0);
        const auto element = [&](std::int64_t token, std::int64_t d) {
          return static_cast<int>(static_cast<std::int8_t>(base[values ? token * head_dim + d : d * 16 + token]));
        };
        const auto scale = [&](std::int64_t token) {
          float x;
          std::memcpy(&x, base + data + 4 * token, sizeof x);
          return x;
        };
        const int ties[] = {-127, 0, 2, -2, 3, 126}, large[] = {0, 127, -42};
        for (std::int64_t d = 0; d < head_dim; ++d) {
          CHECK(element(1, d) == (d < 6 ? ties[d] : 0));
          CHECK(element(2, d) == 0);
          CHECK(element(3, d) == (d < 3 ? large[d] : 0));
        }
        CHECK(scale(1) == 1.0f && scale(2) == 0.0f && scale(3) == 3e38f / 127.0f);
        for (std::int64_t t = 4; t < 16; ++t) CHECK(scale(t) == 0.0f);  // not written
        const std::vector<float>& given = values ? w.v[0] : w.k[0];
        for (std::int64_t d = 0; d < head_dim; ++d) {  // token 16, an ordinary one
          const float error =
              given[16 * n + static_cast<std::size_t>(d)] - scale(0) * static_cast<float>(element(0, d));
          CHECK(std::fabs(error) <= 0.5001f * scale(0));
        }
      }
    }
  }
}

void test_a_plan_covers_every_row_once_and_feeds_the_threads() {
  World w({9, 3, 64}, KVType::F16, {{5000, 1}});
  CHECK(attention_plan(w.job, 1).items.size() == 3);
  CHECK(attention_plan(w.job, 2).items.size() == 15 && attention_plan(w.job, 2).merges.size() == 3);
  std::vector<Span> many(32, Span{1100, 1});
  World batch({9, 3, 64}, KVType::F16, many);
  CHECK(attention_plan(batch.job, 2).items.size() == 96 && attention_plan(batch.job, 2).partial_floats == 0);
  World mixed({9, 3, 64}, KVType::F16, {{0, 300}, {2000, 1}, {1000, 40}, {7, 1}});
  for (const int threads : {1, 2, 64}) {
    std::vector<int> seen(static_cast<std::size_t>(mixed.rows * 3 * 3), 0);
    const AttentionPlan plan = attention_plan(mixed.job, threads);
    for (const AttentionItem& item : plan.items) {
      for (std::int64_t r = item.row_begin; r < item.row_end; ++r) {
        const AttentionRow& row = plan.rows[static_cast<std::size_t>(r)];
        for (std::int64_t g = item.segment_begin; g < std::min(item.segment_end, row.position / kSegmentTokens + 1);
             ++g)
          ++seen[static_cast<std::size_t>((row.row * 3 + item.kv_head) * 3 + g)];
      }
    }
    for_every_row(mixed, [&](std::size_t, std::int64_t position, std::int64_t row, std::int64_t head) {
      for (std::int64_t g = 0; g < 3; ++g) {
        CHECK(seen[static_cast<std::size_t>((row * 3 + head / 3) * 3 + g)] == (g <= position / kSegmentTokens ? 1 : 0));
      }
    });
  }
}

}  // namespace

int main() {
  test_every_table_and_every_cut_gives_the_same_bits();
  test_bits_are_those_of_the_written_order_and_of_no_other();
  test_values_are_near_double_precision();
  test_a_decode_row_gives_the_bits_of_the_same_row_in_a_chunk();
  test_a_reused_block_must_be_zeroed();
  test_nothing_past_a_querys_own_block_is_read();
  test_kv_store_writes_the_same_bytes_and_flags_what_is_not_finite();
  test_int8_is_written_by_the_rules_of_the_layout();
  test_a_plan_covers_every_row_once_and_feeds_the_threads();
  return 0;
}
