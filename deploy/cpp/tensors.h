// What goes into a program and what comes out of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

using Tensors = std::vector<at::Tensor>;
