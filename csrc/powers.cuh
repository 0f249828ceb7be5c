// Scores as powers of two, which is what the hardware raises.
#pragma once

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
