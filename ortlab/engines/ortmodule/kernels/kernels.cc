// Kernels for ORT's CPU graphs, called through its ATen operator.
//
// What runs here runs on torch's threads: ORT's own workers and torch's would spin on the same
// cores. Tensors are dense, float32 or bfloat16; where an operator takes `low`, it tells the type of
// the result. All but products compute in float32. Random numbers are Philox 4x32-10 (Salmon et
// al., Parallel random numbers: as easy as 1, 2, 3, SC 2011), keyed by one draw from torch's CPU
// generator: torch.manual_seed holds for them, and the number of threads does not matter.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::BFloat16;

constexpr int64_t kGrain = 16384;   // elements that are worth a thread's start
constexpr int kLanes = 16;          // of an AVX-512 register
constexpr int kBlock = 4 * kLanes;  // random numbers of one round of Philox

int64_t grain(int64_t columns) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)); }

// ---- memory -------------------------------------------------------------------------------------

// Keeps large blocks for the next step, as ORT's arena does: a fresh one costs a page fault for
// every few kilobytes. It holds at most twice what was once in use at a time; what has waited for
// longest goes first. Huge pages are not asked for: in a virtual machine that gives its host what is
// free, the first touch of them takes about a millisecond for each megabyte, four times that of small
// ones, and steps after that are faster by 4% at most.
class Pool {
 public:
  static Pool& get() {
    static auto* pool = new Pool;  // outlives every tensor
    return *pool;
  }

  struct Block {
    void* start;
    size_t bytes;
  };

  Block take(size_t wanted) {
    const size_t bytes = (wanted + kSmall - 1) / kSmall * kSmall;
    const size_t spare = bytes >= kLarge ? bytes / 4 : bytes;
    std::lock_guard<std::mutex> lock(mutex_);
    Block block{nullptr, bytes};
    if (const auto found = idle_.lower_bound(bytes);
        found != idle_.end() && found->first <= bytes + spare) {
      block = {found->second.start, found->first};
      idle_bytes_ -= block.bytes;
      idle_.erase(found);
    } else {
      const size_t used = used_bytes_ + bytes;
      free_idle(2 * std::max(most_bytes_, used) - used);
      ++taken_;
      block.start = std::aligned_alloc(kSmall, bytes);
      if (block.start == nullptr) {  // what waits for another size is as much memory as any
        free_idle(0);
        block.start = std::aligned_alloc(kSmall, bytes);
      }
      TORCH_CHECK(block.start != nullptr, "not enough memory: ", bytes, " bytes");
    }
    used_bytes_ += block.bytes;
    most_bytes_ = std::max(most_bytes_, used_bytes_);
    return block;
  }

  void give(Block block) {
    std::lock_guard<std::mutex> lock(mutex_);
    used_bytes_ -= block.bytes;
    idle_.emplace(block.bytes, Idle{block.start, ++given_});
    idle_bytes_ += block.bytes;
    free_idle(keeps_ ? 2 * most_bytes_ - used_bytes_ : 0);
  }

  // Bytes in use, bytes kept for later, and how many blocks were asked of the system so far.
  std::tuple<int64_t, int64_t, int64_t> held() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {used_bytes_, idle_bytes_, taken_};
  }

  // Frees what is not in use; with `keeps` false also all that is given back from now on.
  int64_t trim(bool keeps) {
    std::lock_guard<std::mutex> lock(mutex_);
    keeps_ = keeps;
    most_bytes_ = used_bytes_;
    const auto freed = static_cast<int64_t>(idle_bytes_);
    free_idle(0);
    return freed;
  }

 private:
  static constexpr size_t kSmall = 64 << 10, kLarge = 2 << 20;

  struct Idle {
    void* start;
    int64_t since;
  };

  void free_idle(size_t most) {
    while (idle_bytes_ > most) {
      const auto oldest = std::min_element(
          idle_.begin(), idle_.end(),
          [](const auto& a, const auto& b) { return a.second.since < b.second.since; });
      std::free(oldest->second.start);
      idle_bytes_ -= oldest->first;
      idle_.erase(oldest);
    }
  }

  std::mutex mutex_;
  std::multimap<size_t, Idle> idle_;
  int64_t taken_ = 0, given_ = 0;
  size_t used_bytes_ = 0, idle_bytes_ = 0, most_bytes_ = 0;
  bool keeps_ = true;
};

constexpr size_t kWorthKeeping = 64 << 10;

Tensor fresh(IntArrayRef sizes, at::ScalarType type) {
  const auto options = at::TensorOptions().dtype(type);
  const size_t bytes = c10::multiply_integers(sizes) * c10::elementSize(type);
  if (bytes < kWorthKeeping) return at::empty(sizes, options);
  const Pool::Block block = Pool::get().take(bytes);
  return at::from_blob(block.start, sizes, [block](void*) { Pool::get().give(block); }, options);
}

Tensor fresh_like(const Tensor& x) { return fresh(x.sizes(), x.scalar_type()); }

at::ScalarType type_of(bool low) { return low ? at::kBFloat16 : at::kFloat; }

Tensor as(const Tensor& x, at::ScalarType type) {
  return x.scalar_type() == type ? x : fresh(x.sizes(), type).copy_(x);
}

// ---- numbers ------------------------------------------------------------------------------------

inline float number(float x) { return x; }
inline float number(BFloat16 x) { return static_cast<float>(x); }

// Loops become vectors as long as nothing in them branches: what follows selects by bits.
union Bits {
  float value;
  uint32_t bits;
};

// x or, where it is not kept, zero.
inline float where(bool kept, float x) {
  Bits found = {x};
  found.bits &= -static_cast<uint32_t>(kept);
  return found.value;
}

inline float negated_where(bool negates, float x) {
  Bits found = {x};
  found.bits ^= static_cast<uint32_t>(negates) << 31;
  return found.value;
}

inline bool is_negative(float x) { return Bits{x}.bits >> 31; }

// Calls f with the elements of x, whichever type they are of.
template <typename F>
void reading(const Tensor& x, const F& f) {
  if (x.scalar_type() == at::kBFloat16)
    f(x.const_data_ptr<BFloat16>());
  else
    f(x.const_data_ptr<float>());
}

template <typename F>
void writing(Tensor& x, const F& f) {
  if (x.scalar_type() == at::kBFloat16)
    f(x.mutable_data_ptr<BFloat16>());
  else
    f(x.mutable_data_ptr<float>());
}

// f(i, x[i] + bias) for each element; the bias runs along the last dimension.
template <typename F>
Tensor mapped(const Tensor& given, const std::optional<Tensor>& bias, bool low, const F& f) {
  const Tensor x = given.contiguous();
  Tensor found = fresh(x.sizes(), type_of(low));
  const Tensor dense = bias.has_value() ? bias->contiguous() : Tensor();
  const float* plus = dense.defined() ? dense.const_data_ptr<float>() : nullptr;
  const int64_t count = x.numel(), columns = std::max<int64_t>(1, plus ? dense.numel() : std::min(count, kGrain));
  reading(x, [&](const auto* in) {
    writing(found, [&](auto* out) {
      at::parallel_for(0, (count + columns - 1) / columns, grain(columns), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t first = row * columns, here = std::min(columns, count - first);
          if (plus)
            for (int64_t i = first, j = 0; j < here; ++i, ++j) out[i] = f(i, number(in[i]) + plus[j]);
          else
            for (int64_t i = first, j = 0; j < here; ++i, ++j) out[i] = f(i, number(in[i]));
        }
      });
    });
  });
  return found;
}

// f(gradient[i], x[i] + bias).
template <typename F>
Tensor mapped_back(const Tensor& given, const Tensor& x, const std::optional<Tensor>& bias, bool low,
                   const F& f) {
  const Tensor gradient = given.contiguous();
  Tensor found;
  reading(gradient, [&](const auto* coming) {
    found = mapped(x, bias, low, [&](int64_t i, float value) { return f(number(coming[i]), value); });
  });
  return found;
}

// e^x for x <= 0, to about 1e-7, and e^-87 below -87: 2^n by the exponent, the rest by a polynomial.
inline float exp_clamped(float x) {
  const float scaled = (x < -87.0f ? -87.0f : x) * 1.44269504f;
  const float whole = std::nearbyint(scaled), rest = scaled - whole;
  float found = 1.5403530e-4f;
  found = found * rest + 1.3333558e-3f;
  found = found * rest + 9.6181291e-3f;
  found = found * rest + 5.5504109e-2f;
  found = found * rest + 2.4022651e-1f;
  found = found * rest + 6.9314718e-1f;
  found = found * rest + 1.0f;
  Bits power;
  power.bits = (static_cast<int32_t>(whole) + 127) << 23;
  return found * power.value;
}

inline float exp_negative(float x) { return x < -87.0f ? 0.0f : exp_clamped(x); }

// The normal distribution's function and density: Abramowitz and Stegun, 7.1.26, off by 1.5e-7 at
// most, which is what torch's vectorized erf is made of as well.
inline void normal(float x, float& below, float& density) {
  const float power = exp_negative(-0.5f * x * x);
  const float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * std::fabs(x));
  const float series =
      ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
       0.254829592f) * t;
  const float tail = 0.5f * series * power;
  below = x < 0 ? tail : 1.0f - tail;
  density = 0.39894228f * power;
}

struct Key {
  uint32_t first, second;
};

Key drawn_key() {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  const uint64_t drawn = generator->random64();
  return {static_cast<uint32_t>(drawn), static_cast<uint32_t>(drawn >> 32)};
}

// What a dropout draws its numbers by, for another one that is to drop the same: [1], of int64. It
// takes the tensor that is dropped from, so that it is drawn in the order of the dropouts.
Tensor key(const Tensor&, double ratio) {
  Tensor found = at::zeros({1}, at::kLong);
  if (ratio > 0) {
    const Key drawn = drawn_key();
    found.mutable_data_ptr<int64_t>()[0] =
        static_cast<int64_t>(uint64_t{drawn.first} | uint64_t{drawn.second} << 32);
  }
  return found;
}

Key key_in(const Tensor& given) {
  const auto drawn = static_cast<uint64_t>(given.const_data_ptr<int64_t>()[0]);
  return {static_cast<uint32_t>(drawn), static_cast<uint32_t>(drawn >> 32)};
}

// kBlock numbers: those of the counters block * kLanes to block * kLanes + kLanes - 1.
#ifdef __AVX512F__
inline void philox(Key key, uint64_t block, uint32_t* out) {
  const uint64_t counter = block * kLanes;
  const auto spread = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  // Products are of the even lanes; the odd ones are shifted into their places and back.
  const auto times = [](__m512i x, uint32_t factor, __m512i& high) {
    const __m512i by = _mm512_set1_epi32(static_cast<int>(factor));
    const __m512i even = _mm512_mul_epu32(x, by);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), by);
    high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    return _mm512_mullo_epi32(x, by);
  };
  __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(counter)), spread);
  __m512i c1 = _mm512_set1_epi32(static_cast<int>(counter >> 32));
  __m512i c2 = _mm512_setzero_si512(), c3 = _mm512_setzero_si512();
  for (int round = 0; round < 10; ++round) {
    __m512i p_high, q_high;
    const __m512i p = times(c0, 0xD2511F53, p_high), q = times(c2, 0xCD9E8D57, q_high);
    c0 = _mm512_xor_si512(_mm512_xor_si512(q_high, c1), _mm512_set1_epi32(static_cast<int>(key.first)));
    c1 = q;
    c2 = _mm512_xor_si512(_mm512_xor_si512(p_high, c3), _mm512_set1_epi32(static_cast<int>(key.second)));
    c3 = p;
    key.first += 0x9E3779B9;
    key.second += 0xBB67AE85;
  }
  _mm512_storeu_si512(out, c0);
  _mm512_storeu_si512(out + kLanes, c1);
  _mm512_storeu_si512(out + 2 * kLanes, c2);
  _mm512_storeu_si512(out + 3 * kLanes, c3);
}
#else
inline void philox(Key key, uint64_t block, uint32_t* out) {
  alignas(64) uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  const uint64_t counter = block * kLanes;
  for (int i = 0; i < kLanes; ++i) {
    c0[i] = static_cast<uint32_t>(counter) + i;
    c1[i] = static_cast<uint32_t>(counter >> 32);
    c2[i] = c3[i] = 0;
  }
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t p = uint64_t{0xD2511F53} * c0[i], q = uint64_t{0xCD9E8D57} * c2[i];
      c0[i] = static_cast<uint32_t>(q >> 32) ^ c1[i] ^ key.first;
      c1[i] = static_cast<uint32_t>(q);
      c2[i] = static_cast<uint32_t>(p >> 32) ^ c3[i] ^ key.second;
      c3[i] = static_cast<uint32_t>(p);
    }
    key.first += 0x9E3779B9;
    key.second += 0xBB67AE85;
  }
  for (int i = 0; i < kLanes; ++i) {
    out[i] = c0[i];
    out[kLanes + i] = c1[i];
    out[2 * kLanes + i] = c2[i];
    out[3 * kLanes + i] = c3[i];
  }
}
#endif

// f for as many elements as are left, kBlock at most: a whole block's number is known to the compiler.
template <typename F>
void in_block(int64_t left, const F& f) {
  if (left >= kBlock)
    f(kBlock);
  else
    f(left);
}

uint32_t threshold(double ratio) {
  return static_cast<uint32_t>(std::min(ratio * 4294967296.0, 4294967295.0));
}

double scale_of_kept(double ratio) { return ratio < 1.0 ? 1.0 / (1.0 - ratio) : 0.0; }

// ---- products -----------------------------------------------------------------------------------

Tensor to_bf16(const Tensor& x) { return as(x.contiguous(), at::kBFloat16); }

// a [..., m, k] @ b [..., k, n], of one type, which the result has too.
Tensor product(const Tensor& a, const Tensor& b) {
  // The graph says which products are lower precision's, whatever surrounds the call.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto sizes = a.sizes().vec();
  sizes.back() = b.size(-1);
  if (b.dim() == 2) {
    const int64_t rows = c10::multiply_integers(a.sizes().slice(0, a.dim() - 1));
    Tensor found = fresh({rows, b.size(1)}, a.scalar_type());
    return at::mm_out(found, a.reshape({rows, a.size(-1)}), b).view(sizes);
  }
  if (a.dim() < 3 || a.sizes().slice(0, a.dim() - 2) != b.sizes().slice(0, b.dim() - 2))
    return at::matmul(a, b);
  const int64_t outer = c10::multiply_integers(a.sizes().slice(0, a.dim() - 2));
  const auto x = a.reshape({outer, a.size(-2), a.size(-1)});
  const auto y = b.reshape({outer, b.size(-2), b.size(-1)});
  Tensor found = fresh({x.size(0), x.size(1), y.size(2)}, a.scalar_type());
  return at::bmm_out(found, x, y).view(sizes);
}

Tensor flipped(const Tensor& x, bool flip) { return flip ? x.transpose(-1, -2) : x; }

// op(a) @ op(b) * alpha.
Tensor matmul(const Tensor& a, const Tensor& b, bool transpose_a, bool transpose_b, double alpha,
              bool low) {
  Tensor found = as(product(flipped(a, transpose_a), flipped(b, transpose_b)), type_of(low));
  return alpha == 1.0 ? found : found.mul_(alpha);
}

// x [..., k] @ op(b) [k, n] + bias [n].
Tensor linear(const Tensor& x, const Tensor& b, const Tensor& bias, bool transpose_b, bool low) {
  const Tensor matrix = flipped(b, transpose_b);
  const int64_t count = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  const Tensor rows = x.reshape({count, x.size(-1)});
  auto sizes = x.sizes().vec();
  const int64_t columns = sizes.back() = matrix.size(1);
  if (x.scalar_type() == at::kFloat) {
    Tensor found = fresh({rows.size(0), columns}, at::kFloat);
    return at::addmm_out(found, bias, rows, matrix).view(sizes);
  }
  const Tensor each = bias.expand({columns}).contiguous();
  return mapped(product(rows, matrix), each, low, [](int64_t, float value) { return value; }).view(sizes);
}

// op(a) @ op(b) + c, all matrices.
Tensor add_product(const Tensor& a, const Tensor& b, const Tensor& c, bool transpose_a,
                   bool transpose_b) {
  const Tensor x = flipped(a, transpose_a), y = flipped(b, transpose_b);
  if (x.scalar_type() == at::kFloat) {
    Tensor found = fresh({x.size(0), y.size(1)}, at::kFloat);
    return at::addmm_out(found, c, x, y);
  }
  const Tensor plain = product(x, y), more = c.expand(plain.sizes()).contiguous();
  const float* plus = more.const_data_ptr<float>();
  return mapped(plain, std::nullopt, false, [&](int64_t i, float value) { return value + plus[i]; });
}

// ---- elementwise --------------------------------------------------------------------------------

// x with each element zero with probability `ratio`, else scaled up; and which were kept, as 0, 1.
std::tuple<Tensor, Tensor> dropout_by(const Tensor& given, Key key, double ratio, bool low) {
  const Tensor x = given.contiguous();
  if (x.scalar_type() == at::kDouble) {
    const Tensor mask = std::get<1>(dropout_by(at::ones(x.sizes(), at::kFloat), key, ratio, false));
    return {x.mul(mask).mul_(scale_of_kept(ratio)), mask};
  }
  Tensor found = fresh(x.sizes(), type_of(low)), mask = fresh(x.sizes(), at::kByte);
  uint8_t* keep = mask.mutable_data_ptr<uint8_t>();
  const uint32_t least = threshold(ratio);
  const float scale = scale_of_kept(ratio);
  const int64_t count = x.numel(), blocks = (count + kBlock - 1) / kBlock;
  reading(x, [&](const auto* in) {
    writing(found, [&](auto* out) {
      at::parallel_for(0, blocks, kGrain / kBlock, [&](int64_t begin, int64_t end) {
        alignas(64) uint32_t random[kBlock] = {};
        for (int64_t block = begin; block < end; ++block) {
          if (ratio > 0) philox(key, static_cast<uint64_t>(block), random);
          const int64_t start = block * kBlock;
          const auto spread = [=, &random](int64_t here) {  // by copies, which no mask can alias
            for (int64_t i = 0; i < here; ++i) keep[start + i] = random[i] >= least;
            for (int64_t i = 0; i < here; ++i)
              out[start + i] = where(random[i] >= least, number(in[start + i]) * scale);
          };
          in_block(count - start, spread);
        }
      });
    });
  });
  return {found, mask};
}

std::tuple<Tensor, Tensor> dropout(const Tensor& x, double ratio, bool low) {
  return dropout_by(x, ratio > 0 ? drawn_key() : Key{}, ratio, low);
}

std::tuple<Tensor, Tensor> dropout_of(const Tensor& x, const Tensor& key, double ratio, bool low) {
  return dropout_by(x, key_in(key), ratio, low);
}

Tensor dropout_backward(const Tensor& gradient, const Tensor& kept, double ratio, bool low) {
  if (gradient.scalar_type() == at::kDouble) return gradient.mul(kept).mul_(scale_of_kept(ratio));
  const Tensor mask = kept.contiguous();
  const uint8_t* keep = mask.const_data_ptr<uint8_t>();
  const float scale = scale_of_kept(ratio);
  return mapped(gradient, std::nullopt, low,
                [&](int64_t i, float value) { return where(keep[i], value * scale); });
}

Tensor bias_gelu(const Tensor& x, const Tensor& bias, bool low) {
  return mapped(x, bias, low, [](int64_t, float value) {
    float below, density;
    normal(value, below, density);
    return value * below;
  });
}

Tensor bias_gelu_backward(const Tensor& gradient, const Tensor& x, const Tensor& bias, bool low) {
  return mapped_back(gradient, x, bias, low, [](float coming, float value) {
    float below, density;
    normal(value, below, density);
    return coming * (below + value * density);
  });
}

constexpr float kCubic = 0.044715f, kRoot = 0.79788456f;  // the root of 2 / pi

inline float hyperbolic_tangent(float x) {
  const float power = exp_clamped(-2.0f * std::fabs(x));
  return std::copysign((1.0f - power) / (1.0f + power), x);
}

// GELU's approximation by tanh.
Tensor fast_gelu(const Tensor& x, const std::optional<Tensor>& bias, bool low) {
  return mapped(x, bias, low, [](int64_t, float value) {
    const float inner = kRoot * (value + kCubic * value * value * value);
    return 0.5f * value * (1.0f + hyperbolic_tangent(inner));
  });
}

Tensor fast_gelu_backward(const Tensor& gradient, const Tensor& x, const std::optional<Tensor>& bias,
                          bool low) {
  return mapped_back(gradient, x, bias, low, [](float coming, float value) {
    const float square = value * value;
    const float tangent = hyperbolic_tangent(kRoot * value * (1.0f + kCubic * square));
    const float slope = kRoot * (1.0f + 3.0f * kCubic * square) * (1.0f - tangent * tangent);
    return coming * 0.5f * (1.0f + tangent + value * slope);
  });
}

// By what relu gave.
Tensor relu_backward(const Tensor& gradient, const Tensor& result, bool low) {
  return mapped_back(gradient, result, std::nullopt, low,
                     [](float coming, float value) { return value <= 0 ? 0.0f : coming; });
}

Tensor add(const Tensor& a, const Tensor& b) {
  Tensor found = fresh(at::infer_size(a.sizes(), b.sizes()), at::kFloat);
  return at::add_out(found, a, b);
}

// The sum of three or four tensors of one shape, in one pass.
Tensor sum(const Tensor& a, const Tensor& b, const Tensor& c, const std::optional<Tensor>& d) {
  const Tensor w = a.contiguous(), x = b.contiguous(), y = c.contiguous();
  const Tensor z = d.has_value() ? d->contiguous() : Tensor();
  TORCH_CHECK(w.sizes() == x.sizes() && w.sizes() == y.sizes() && (!z.defined() || w.sizes() == z.sizes()),
              "sums are of tensors of one shape");
  Tensor found = fresh(w.sizes(), at::kFloat);
  float* out = found.mutable_data_ptr<float>();
  reading(w, [&](const auto* pw) {
    using T = std::remove_reference_t<decltype(*pw)>;
    const T *px = x.const_data_ptr<std::remove_const_t<T>>(), *py = y.const_data_ptr<std::remove_const_t<T>>();
    const T* pz = z.defined() ? z.const_data_ptr<std::remove_const_t<T>>() : nullptr;
    at::parallel_for(0, w.numel(), kGrain, [&](int64_t begin, int64_t end) {
      if (pz)
        for (int64_t i = begin; i < end; ++i)
          out[i] = number(pw[i]) + number(px[i]) + number(py[i]) + number(pz[i]);
      else
        for (int64_t i = begin; i < end; ++i) out[i] = number(pw[i]) + number(px[i]) + number(py[i]);
    });
  });
  return found;
}

Tensor permute(const Tensor& x, IntArrayRef axes) {
  const Tensor seen = x.permute(axes);
  return fresh(seen.sizes(), x.scalar_type()).copy_(seen);
}

Tensor reduce_sum(const Tensor& x, IntArrayRef axes, bool keep) {
  std::vector<bool> summed(x.dim());
  for (const int64_t axis : axes) summed[at::maybe_wrap_dim(axis, x.dim())] = true;
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i)
    if (keep || !summed[i]) sizes.push_back(summed[i] ? 1 : x.size(i));
  Tensor found = fresh(sizes, at::kFloat);
  return at::sum_out(found, x, axes, keep, at::kFloat);
}

// ---- rows ---------------------------------------------------------------------------------------

Tensor softmax(const Tensor& x, int64_t axis) {
  Tensor found = fresh_like(x);
  return at::_softmax_out(found, x, axis, false);
}

Tensor softmax_backward(const Tensor& gradient, const Tensor& found, int64_t axis) {
  Tensor by_x = fresh_like(found);
  return at::_softmax_backward_data_out(by_x, gradient, found, axis, at::kFloat);
}

// Layer normalisation over the last dimension: the result, and mean and 1 / deviation of each row.
std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor& given, const Tensor& given_weight,
                                              const Tensor& given_bias, double eps) {
  const Tensor x = given.contiguous();
  const Tensor weight = given_weight.contiguous(), bias = given_bias.contiguous();
  auto sizes = x.sizes().vec();
  const int64_t columns = sizes.back(), rows = columns ? x.numel() / columns : 0;
  sizes.back() = 1;
  Tensor found = fresh_like(x), mean = fresh(sizes, at::kFloat), rstd = fresh(sizes, at::kFloat);
  const float *in = x.const_data_ptr<float>(), *by = weight.const_data_ptr<float>();
  const float* plus = bias.const_data_ptr<float>();
  float *out = found.mutable_data_ptr<float>(), *means = mean.mutable_data_ptr<float>();
  float* rstds = rstd.mutable_data_ptr<float>();
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* from = in + row * columns;
      float* to = out + row * columns;
      float total = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < columns; ++j) total += from[j];
      const float center = total / columns;
#pragma omp simd reduction(+ : squares)
      for (int64_t j = 0; j < columns; ++j) squares += (from[j] - center) * (from[j] - center);
      const float scale = 1.0f / std::sqrt(squares / columns + static_cast<float>(eps));
      for (int64_t j = 0; j < columns; ++j) to[j] = (from[j] - center) * scale * by[j] + plus[j];
      means[row] = center;
      rstds[row] = scale;
    }
  });
  return {found, mean, rstd};
}

// Gradients of x, weight and bias.
std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(const Tensor& given, const Tensor& at_x,
                                                       const Tensor& given_weight,
                                                       const Tensor& given_mean,
                                                       const Tensor& given_rstd) {
  const Tensor gradient = given.contiguous(), x = at_x.contiguous();
  const Tensor weight = given_weight.contiguous(), mean = given_mean.contiguous();
  const Tensor rstd = given_rstd.contiguous();
  const int64_t columns = weight.numel(), rows = columns ? x.numel() / columns : 0;
  Tensor by_x = fresh(x.sizes(), at::kFloat);
  const int64_t threads = at::get_num_threads();
  const Tensor sums = at::zeros({threads, 2, columns}, at::kFloat);  // of each thread, for weight and bias
  const float *in = x.const_data_ptr<float>(), *by = weight.const_data_ptr<float>();
  const float *means = mean.const_data_ptr<float>(), *rstds = rstd.const_data_ptr<float>();
  float *out = by_x.mutable_data_ptr<float>(), *all = sums.mutable_data_ptr<float>();
  reading(gradient, [&](const auto* coming) {
    at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
      float* for_weight = all + at::get_thread_num() * 2 * columns;
      float* for_bias = for_weight + columns;
      for (int64_t row = begin; row < end; ++row) {
        const auto* from = coming + row * columns;
        const float *values = in + row * columns, center = means[row], scale = rstds[row];
        float total = 0.0f, projected = 0.0f;
#pragma omp simd reduction(+ : total, projected)
        for (int64_t j = 0; j < columns; ++j) {
          const float normed = (values[j] - center) * scale, step = number(from[j]);
          for_weight[j] += step * normed;
          for_bias[j] += step;
          total += step * by[j];
          projected += step * by[j] * normed;
        }
        total /= columns;
        projected /= columns;
        float* to = out + row * columns;
        for (int64_t j = 0; j < columns; ++j)
          to[j] = scale * (number(from[j]) * by[j] - total - (values[j] - center) * scale * projected);
      }
    });
  });
  const Tensor found = at::sum(sums, {0});
  return {by_x, found.select(0, 0), found.select(0, 1)};
}

// The cross entropy of logits [rows, classes] and labels [rows], their mean or sum without those
// labelled `ignored`; and the logarithm of each row's summed exponentials.
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& given, const Tensor& labels, int64_t ignored,
                                         bool mean) {
  const Tensor logits = given.contiguous(), targets = labels.contiguous();
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const int64_t* target = targets.const_data_ptr<int64_t>();
  int64_t counted = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (target[row] == ignored) continue;
    TORCH_CHECK_INDEX(target[row] >= 0 && target[row] < classes, "Target ", target[row],
                      " is out of bounds.");
    ++counted;
  }
  Tensor sums = fresh({rows}, at::kFloat), losses = at::zeros({rows}, at::kFloat);
  float *log_sums = sums.mutable_data_ptr<float>(), *lost = losses.mutable_data_ptr<float>();
  reading(logits, [&](const auto* all) {
    at::parallel_for(0, rows, grain(classes), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const auto* in = all + row * classes;
        float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < classes; ++j) most = std::max(most, number(in[j]));
#pragma omp simd reduction(+ : total)
        for (int64_t j = 0; j < classes; ++j) total += exp_negative(number(in[j]) - most);
        log_sums[row] = most + std::log(total);
        if (target[row] != ignored) lost[row] = log_sums[row] - number(in[target[row]]);
      }
    });
  });
  Tensor loss = at::sum(losses);
  return {mean ? loss.div_(static_cast<double>(counted)) : loss, sums};
}

// The gradient of the logits, plus `more`; a single zero there stands for zeros.
Tensor cross_entropy_backward(const Tensor& gradient, const Tensor& given, const Tensor& given_sums,
                              const Tensor& labels, int64_t ignored, bool mean,
                              const std::optional<Tensor>& more, bool low) {
  const Tensor logits = given.contiguous(), targets = labels.contiguous();
  const Tensor sums = given_sums.contiguous();
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const bool adds = more.has_value() && more->numel() == logits.numel();
  const Tensor extra = adds ? more->contiguous() : Tensor();
  const float* plus = adds ? extra.const_data_ptr<float>() : nullptr;
  const int64_t* target = targets.const_data_ptr<int64_t>();
  const float* log_sums = sums.const_data_ptr<float>();
  const auto counted = std::count_if(target, target + rows, [&](int64_t t) { return t != ignored; });
  const float scale = *gradient.const_data_ptr<float>() / (mean ? static_cast<float>(counted) : 1.0f);
  Tensor found = fresh(logits.sizes(), type_of(low));
  reading(logits, [&](const auto* all) {
    writing(found, [&](auto* to) {
      at::parallel_for(0, rows, grain(classes), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const auto* in = all + row * classes;
          auto* out = to + row * classes;
          const bool counts = target[row] != ignored;
          const float by = counts ? scale : 0.0f, log_sum = log_sums[row];
          const float hit = counts ? number(in[target[row]]) : 0.0f;
          const float* added = plus ? plus + row * classes : nullptr;
          if (added)
            for (int64_t j = 0; j < classes; ++j)
              out[j] = by * exp_negative(number(in[j]) - log_sum) + added[j];
          else
            for (int64_t j = 0; j < classes; ++j) out[j] = by * exp_negative(number(in[j]) - log_sum);
          if (counts) {
            const int64_t j = target[row];
            out[j] = by * (exp_negative(hit - log_sum) - 1.0f) + (added ? added[j] : 0.0f);
          }
        }
      });
    });
  });
  return found;
}

// ---- attention ----------------------------------------------------------------------------------

// A mask [batch, heads, queries, keys], broadcast; float to be added or bool of what is seen.
struct Mask {
  Tensor expanded;
  bool adds = false;

  Mask(const std::optional<Tensor>& given, IntArrayRef sizes) {
    if (!given.has_value() || !given->defined()) return;
    adds = given->is_floating_point();
    expanded = (adds ? *given : given->to(at::kByte)).expand(sizes);
  }

  // Puts what the scores of one query get added into `row`.
  void fill(int64_t batch, int64_t head, int64_t query, int64_t keys, float* row) const {
    const int64_t at = batch * expanded.stride(0) + head * expanded.stride(1) + query * expanded.stride(2);
    const int64_t step = expanded.stride(3);
    if (adds) {
      const float* from = expanded.const_data_ptr<float>() + at;
      for (int64_t j = 0; j < keys; ++j) row[j] = from[j * step];
    } else {
      const uint8_t* from = expanded.const_data_ptr<uint8_t>() + at;
      for (int64_t j = 0; j < keys; ++j)
        row[j] = from[j * step] ? 0.0f : -std::numeric_limits<float>::infinity();
    }
  }
};

// Scores, in place, become the weights that values are summed with; `kept` gets the softmax, with
// the sign bit set where dropout dropped it.
template <typename T>
void weigh(Tensor& scores, Tensor& kept, const Mask& mask, IntArrayRef sizes, Key key, double ratio,
           bool causal, float scale) {
  const int64_t heads = sizes[1], queries = sizes[2], keys = sizes[3];
  const uint32_t least = threshold(ratio);
  const float up = scale_of_kept(ratio);
  const int64_t blocks = (keys + kBlock - 1) / kBlock;
  T* all = scores.mutable_data_ptr<T>();
  T* softmaxes = kept.mutable_data_ptr<T>();
  at::parallel_for(0, sizes[0] * heads * queries, grain(4 * keys), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(keys), plus(keys, 0.0f);
    alignas(64) uint32_t random[kBlock] = {};
    float* values = buffer.data();
    for (int64_t row = begin; row < end; ++row) {
      const int64_t query = row % queries, seen = causal ? std::min(keys, query + 1) : keys;
      T* weights = all + row * keys;
      T* softmax = softmaxes + row * keys;
      if (mask.expanded.defined())
        mask.fill(row / queries / heads, row / queries % heads, query, keys, plus.data());
      const float* added = plus.data();
      float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
#pragma omp simd reduction(max : most)
      for (int64_t j = 0; j < seen; ++j) {
        values[j] = number(weights[j]) * scale + added[j];
        most = std::max(most, values[j]);
      }
      if (std::isinf(most) && most < 0) most = 0.0f;  // sees nothing: all weights become zero
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < seen; ++j) {
        values[j] = exp_negative(values[j] - most);
        total += values[j];
      }
      const float inverse = total > 0 ? 1.0f / total : (total == 0 ? 0.0f : total);
      for (int64_t j = seen; j < keys; ++j) values[j] = 0.0f;
      for (int64_t block = 0; block < blocks; ++block) {
        if (ratio > 0) philox(key, static_cast<uint64_t>(row * blocks + block), random);
        const int64_t start = block * kBlock;
        const auto spread = [=, &random](int64_t here) {
          for (int64_t i = 0; i < here; ++i) {
            const float weight = values[start + i] * inverse;
            softmax[start + i] = static_cast<T>(negated_where(random[i] < least, weight));
            weights[start + i] = static_cast<T>(where(random[i] >= least, weight * up));
          }
        };
        in_block(keys - start, spread);
      }
    }
  });
}

// What `weigh` left in the scores, from what it left in `kept`.
template <typename T>
Tensor weights_of(const Tensor& kept, double ratio) {
  if (ratio == 0) return kept;
  Tensor found = fresh_like(kept);
  const T* in = kept.const_data_ptr<T>();
  T* out = found.mutable_data_ptr<T>();
  const float up = scale_of_kept(ratio);
  at::parallel_for(0, kept.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float value = number(in[i]);
      out[i] = static_cast<T>(where(!is_negative(value), value * up));
    }
  });
  return found;
}

// The gradient of the weights, in place, becomes that of the scores before their scale.
template <typename T>
void weigh_backward(Tensor& gradient, const Tensor& kept, double ratio) {
  const int64_t keys = kept.size(-1);
  const float up = scale_of_kept(ratio);
  T* all = gradient.mutable_data_ptr<T>();
  const T* softmaxes = kept.const_data_ptr<T>();
  at::parallel_for(0, keys ? kept.numel() / keys : 0, grain(2 * keys), [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(keys);
    float* by_weight = buffer.data();
    for (int64_t row = begin; row < end; ++row) {
      T* given = all + row * keys;
      const T* softmax = softmaxes + row * keys;
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < keys; ++j) {
        const float signed_weight = number(softmax[j]);
        by_weight[j] = where(!is_negative(signed_weight), number(given[j]) * up);
        total += by_weight[j] * std::fabs(signed_weight);
      }
      for (int64_t j = 0; j < keys; ++j)
        given[j] = static_cast<T>(std::fabs(number(softmax[j])) * (by_weight[j] - total));
    }
  });
}

// [batch * heads, rows, size] of the type that products take.
Tensor matrices(const Tensor& x, bool low) {
  return as(x.contiguous(), type_of(low)).view({x.size(0) * x.size(1), x.size(2), x.size(3)});
}

// Each with the batch and heads of all three, as matmul broadcasts them.
std::array<Tensor, 3> together(const Tensor& query, const Tensor& key, const Tensor& value) {
  const auto outer = [](const Tensor& x) { return x.sizes().slice(0, 2); };
  const auto both = at::infer_size(at::infer_size(outer(query), outer(key)), outer(value));
  const auto wide = [&](const Tensor& x) { return x.expand({both[0], both[1], -1, -1}); };
  return {wide(query), wide(key), wide(value)};
}

Tensor shaped(const Tensor& x, IntArrayRef sizes, bool low) { return as(x, type_of(low)).view(sizes); }

// softmax(query @ key.T * scale + mask), with dropout, @ value: [batch, heads, queries, size], and
// the softmax [batch * heads, queries, keys] for the gradient. Products are of bfloat16 with `low`,
// which is the result's type with `low_result`.
std::tuple<Tensor, Tensor> attention_by(Key drawn, const Tensor& query, const Tensor& key,
                                        const Tensor& value, const std::optional<Tensor>& mask,
                                        double ratio, bool causal, double scale, bool low,
                                        bool low_result) {
  const auto [q, k, v] = together(query, key, value);
  const std::vector<int64_t> sizes = {q.size(0), q.size(1), q.size(2), k.size(2)};
  Tensor scores = product(matrices(q, low), matrices(k, low).transpose(1, 2));
  Tensor kept = fresh_like(scores);
  const Mask masked(mask, sizes);
  (low ? weigh<BFloat16> : weigh<float>)(scores, kept, masked, sizes, drawn, ratio, causal,
                                         static_cast<float>(scale));
  const Tensor found = product(scores, matrices(v, low));
  return {shaped(found, {sizes[0], sizes[1], sizes[2], value.size(3)}, low_result), kept};
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                     const std::optional<Tensor>& mask, double ratio, bool causal,
                                     double scale, bool low, bool low_result) {
  const Key drawn = ratio > 0 ? drawn_key() : Key{};
  return attention_by(drawn, query, key, value, mask, ratio, causal, scale, low, low_result);
}

std::tuple<Tensor, Tensor> attention_of(const Tensor& drawn, const Tensor& query, const Tensor& key,
                                        const Tensor& value, const std::optional<Tensor>& mask,
                                        double ratio, bool causal, double scale, bool low,
                                        bool low_result) {
  return attention_by(key_in(drawn), query, key, value, mask, ratio, causal, scale, low, low_result);
}

// Gradients of query, key, value and of a mask that is added, as far as `wanted` tells.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, const Tensor& kept, double ratio, double scale,
    std::array<bool, 4> wanted, bool low_result) {
  const bool low = kept.scalar_type() == at::kBFloat16;
  const auto [q, k, v] = together(query, key, value);
  const Tensor coming = matrices(gradient, low);
  // The gradient of what was repeated is a sum.
  const auto for_input = [&](const Tensor& found, const Tensor& wide, const Tensor& input) {
    const Tensor shaped = as(found, type_of(low_result)).view(wide.sizes());
    return wide.sizes() == input.sizes() ? shaped : shaped.sum_to_size(input.sizes()).contiguous();
  };
  Tensor by_value, by_query, by_key, by_mask;
  if (wanted[2]) {
    const Tensor weights = low ? weights_of<BFloat16>(kept, ratio) : weights_of<float>(kept, ratio);
    by_value = for_input(product(weights.transpose(1, 2), coming), v, value);
  }
  if (wanted[0] || wanted[1] || wanted[3]) {
    Tensor scores = product(coming, matrices(v, low).transpose(1, 2));
    (low ? weigh_backward<BFloat16> : weigh_backward<float>)(scores, kept, ratio);
    if (wanted[3] && mask.has_value())
      by_mask = as(scores, at::kFloat)
                    .view({q.size(0), q.size(1), q.size(2), k.size(2)})
                    .sum_to_size(mask->sizes())
                    .contiguous();
    if (wanted[0]) by_query = for_input(product(scores, matrices(k, low)).mul_(scale), q, query);
    if (wanted[1])
      by_key = for_input(product(scores.transpose(1, 2), matrices(q, low)).mul_(scale), k, key);
  }
  return {by_query, by_key, by_value, by_mask};
}

// ---- embedding ----------------------------------------------------------------------------------

// The gradient of a table of `rows` embeddings: those of equal indices add up. `padding` gets none.
Tensor embedding_backward(const Tensor& given, const Tensor& indices, int64_t rows, int64_t padding) {
  const Tensor gradient = given.contiguous(), places = indices.to(at::kLong).contiguous();
  const int64_t columns = gradient.size(-1), count = places.numel();
  Tensor found = fresh({rows, columns}, at::kFloat);
  const int64_t* at = places.const_data_ptr<int64_t>();
  const float* in = gradient.const_data_ptr<float>();
  float* out = found.mutable_data_ptr<float>();
  at::parallel_for(0, rows, grain(columns), [&](int64_t begin, int64_t end) {
    std::fill(out + begin * columns, out + end * columns, 0.0f);
    for (int64_t i = 0; i < count; ++i)
      if (at[i] >= begin && at[i] < end && at[i] != padding)
        for (int64_t j = 0; j < columns; ++j) out[at[i] * columns + j] += in[i * columns + j];
  });
  return found;
}

int64_t trim(bool keeps) { return Pool::get().trim(keeps); }

// For who must not be heard by a tracer or a mode of torch's, see kernels/__init__.py.
size_t trim_address() { return reinterpret_cast<size_t>(&trim); }

std::tuple<int64_t, int64_t, int64_t> held() { return Pool::get().held(); }

}  // namespace

TORCH_LIBRARY(ortlab_kernels, library) {
  library.def("trim(bool keeps) -> int", trim);
  library.def("held() -> (int, int, int)", held);
  library.def("to_bf16(Tensor x) -> Tensor", to_bf16);
  library.def(
      "matmul(Tensor a, Tensor b, bool transpose_a, bool transpose_b, float alpha, bool low) -> Tensor",
      matmul);
  library.def("linear(Tensor x, Tensor b, Tensor bias, bool transpose_b, bool low) -> Tensor", linear);
  library.def("key(Tensor x, float ratio) -> Tensor", key);
  library.def("dropout(Tensor x, float ratio, bool low) -> (Tensor, Tensor)", dropout);
  library.def("dropout_of(Tensor x, Tensor key, float ratio, bool low) -> (Tensor, Tensor)", dropout_of);
  library.def(
      "dropout_backward(Tensor gradient, Tensor mask, float ratio, bool low) -> Tensor",
      dropout_backward);
  library.def("bias_gelu(Tensor x, Tensor bias, bool low) -> Tensor", bias_gelu);
  library.def(
      "bias_gelu_backward(Tensor gradient, Tensor x, Tensor bias, bool low) -> Tensor",
      bias_gelu_backward);
  library.def(
      "add_product(Tensor a, Tensor b, Tensor c, bool transpose_a, bool transpose_b) -> Tensor",
      add_product);
  library.def("fast_gelu(Tensor x, Tensor? bias, bool low) -> Tensor", fast_gelu);
  library.def(
      "fast_gelu_backward(Tensor gradient, Tensor x, Tensor? bias, bool low) -> Tensor",
      fast_gelu_backward);
  library.def("relu_backward(Tensor gradient, Tensor result, bool low) -> Tensor", relu_backward);
  library.def(
      "cross_entropy(Tensor logits, Tensor labels, int ignored, bool mean) -> (Tensor, Tensor)",
      cross_entropy);
  library.def(
      "cross_entropy_backward(Tensor gradient, Tensor logits, Tensor sums, Tensor labels, "
      "int ignored, bool mean, Tensor? more, bool low) -> Tensor",
      cross_entropy_backward);
  library.def("add(Tensor a, Tensor b) -> Tensor", add);
  library.def("sum(Tensor a, Tensor b, Tensor c, Tensor? d) -> Tensor", sum);
  library.def("permute(Tensor x, int[] axes) -> Tensor", permute);
  library.def("reduce_sum(Tensor x, int[] axes, bool keep) -> Tensor", reduce_sum);
  library.def("softmax(Tensor x, int axis) -> Tensor", softmax);
  library.def("softmax_backward(Tensor gradient, Tensor found, int axis) -> Tensor", softmax_backward);
  library.def(
      "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
      layer_norm);
  library.def(
      "layer_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> "
      "(Tensor, Tensor, Tensor)",
      layer_norm_backward);
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float ratio, bool causal, "
      "float scale, bool low, bool low_result) -> (Tensor, Tensor)",
      attention);
  library.def(
      "attention_of(Tensor drawn, Tensor query, Tensor key, Tensor value, Tensor? mask, float ratio, "
      "bool causal, float scale, bool low, bool low_result) -> (Tensor, Tensor)",
      attention_of);
  library.def(
      "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, "
      "Tensor kept, float ratio, float scale, bool[4] wanted, bool low_result) -> "
      "(Tensor, Tensor, Tensor, Tensor)",
      attention_backward);
  library.def(
      "embedding_backward(Tensor gradient, Tensor indices, int rows, int padding) -> Tensor",
      embedding_backward);
}
