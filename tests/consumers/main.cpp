#include <tenon/tenon.hpp>
#include <vector>

int main() {
  tenon::define("soft_step", "x*sigmoid(beta*x) + 0.1*tanh(x); beta = 1.5");
  const tenon::Activation f = tenon::activation("gated(soft_step)");  // f(a)*b
  std::vector<float> x(64 * 512, 0.5F), y(64 * 256), dx(64 * 512), dbias(512);
  const auto f32 = [](std::vector<float>& v, int64_t rows) {
    return tenon::matrix(v.data(), tenon::DType::f32, rows, static_cast<int64_t>(v.size()) / rows);
  };
  tenon::forward(f, {.x = f32(x, 64), .y = f32(y, 64)});
  tenon::backward(f,
                  {.grad = f32(y, 64), .x = f32(x, 64), .dx = f32(dx, 64), .dbias = f32(dbias, 1)});
}
