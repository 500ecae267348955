// Matmuls in every transposition, of sizes that no tile divides.
#include <string>

#include "numbers.h"

namespace {

void check(const jaxmha::Kernels& kernels, long rows, long depth, long columns, bool a_transposed,
           bool b_transposed) {
  constexpr long BATCHES = 2;
  Numbers a = random_numbers(Stored::f32, BATCHES * rows * depth);
  Numbers b = random_numbers(Stored::f32, depth * columns);  // the same for both batch rows
  Numbers bias = random_numbers(Stored::f32, columns), y(Stored::f32, BATCHES * rows * columns);
  std::vector<double> expected(y.count());
  for (long i = 0; i < BATCHES * rows; i++)
    for (long j = 0; j < columns; j++) {
      double sum = bias.at(j);
      for (long p = 0; p < depth; p++)
        sum += a.at(a_transposed ? (i / rows * depth + p) * rows + i % rows : i * depth + p) *
               b.at(b_transposed ? j * depth + p : p * columns + j);
      expected[i * columns + j] = sum;
    }
  jaxmha::Matmul call{};
  call.batches = BATCHES, call.rows = rows, call.depth = depth, call.columns = columns;
  call.a_transposed = a_transposed, call.b_transposed = b_transposed;
  call.a = {a.floats(), {0, rows * depth}};
  call.b = {b.floats(), {0, 0}}, call.bias = {bias.floats(), {0, 0}};
  call.y = y.floats();
  Threads pool;
  kernels.matmul(call, pool);
  const std::string name = std::string("matmul_") + (a_transposed ? "t" : "n") +
                           (b_transposed ? "t" : "n") + "_" + std::to_string(depth) + "/y";
  compare(name.c_str(), y, expected);
}

}  // namespace

void check_matmul(const jaxmha::Kernels& kernels) {
  for (const bool a_transposed : {false, true})
    for (const bool b_transposed : {false, true}) {
      check(kernels, 101, 37, 131, a_transposed, b_transposed);
      check(kernels, 13, 521, 67, a_transposed, b_transposed);
    }
}
