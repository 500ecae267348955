// Matmuls in every transposition, of sizes that no tile divides.
#include <string>

#include "numbers.h"

namespace {

template <class E>
const E* entries(Numbers& x) {
  return reinterpret_cast<const E*>(x.data());
}

template <class E>
void check(void (*kernel)(const jaxmha::MatmulOf<E>&, Numbers& y), Stored type, long rows, long depth,
           long columns, bool a_transposed, bool b_transposed) {
  constexpr long BATCHES = 2;
  Numbers a = random_numbers(type, BATCHES * rows * depth);
  Numbers b = random_numbers(type, depth * columns);  // the same for both batch rows
  Numbers bias = random_numbers(type, columns), y(type, BATCHES * rows * columns);
  std::vector<double> expected(y.count());
  for (long i = 0; i < BATCHES * rows; i++)
    for (long j = 0; j < columns; j++) {
      double sum = bias.at(j);
      for (long p = 0; p < depth; p++)
        sum += a.at(a_transposed ? (i / rows * depth + p) * rows + i % rows : i * depth + p) *
               b.at(b_transposed ? j * depth + p : p * columns + j);
      expected[i * columns + j] = sum;
    }
  jaxmha::MatmulOf<E> call{};
  call.batches = BATCHES, call.rows = rows, call.depth = depth, call.columns = columns;
  call.a_transposed = a_transposed, call.b_transposed = b_transposed;
  call.a = {entries<E>(a), {0, rows * depth}};
  call.b = {entries<E>(b), {0, 0}}, call.bias = {entries<E>(bias), {0, 0}};
  kernel(call, y);
  const std::string name = std::string(type == Stored::f32 ? "matmul_" : "matmul_bf16_") + (a_transposed ? "t" : "n") +
                           (b_transposed ? "t" : "n") + "_" + std::to_string(depth) + "/y";
  compare(name.c_str(), y, expected);
}

const jaxmha::Kernels* tried;

void of_float32(const jaxmha::MatmulOf<float>& operands, Numbers& y) {
  jaxmha::Matmul call{operands, y.floats()};
  Threads pool;
  tried->matmul(call, pool);
}

void of_bfloat16(const jaxmha::MatmulOf<uint16_t>& operands, Numbers& y) {
  jaxmha::Bf16Matmul call{operands, y.data(), jaxmha::Float::bf16};
  Threads pool;
  tried->matmul_bf16(call, pool);
}

}  // namespace

void check_matmul(const jaxmha::Kernels& kernels) {
  tried = &kernels;
  for (const bool a_transposed : {false, true})
    for (const bool b_transposed : {false, true}) {
      check(of_float32, Stored::f32, 101, 37, 131, a_transposed, b_transposed);
      check(of_float32, Stored::f32, 13, 521, 67, a_transposed, b_transposed);
      check(of_bfloat16, Stored::bf16, 101, 37, 131, a_transposed, b_transposed);
      check(of_bfloat16, Stored::bf16, 1061, 1123, 67, a_transposed, b_transposed);
    }
}
