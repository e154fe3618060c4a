#include "elementwise.cuh"

// bilinear(gate, up) = gate up
// by gate up, by up gate
// Source: Shazeer, GLU Variants Improve Transformer (2020); Dauphin et al., Language Modeling with Gated Convolutional
// Networks (2017).

ELEMENTWISE T forward(T gate, T up) { return gate * up; }

ELEMENTWISE Many<T, 2> backward(T dy, T gate, T up) { return {dy * up, dy * gate}; }
