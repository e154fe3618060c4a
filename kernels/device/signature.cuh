// What the kernel file defines: the roles of forward's arguments, by their types, and which functions exist. The loader
// includes this after the kernel file, so its functions are declared here.
#pragma once

#include <utility>

#include "elementwise.cuh"

// How many of forward's last arguments are numbers though declared as `T`, not Number<T>: the file's header or definition
// names them as parameters.
#ifndef JITACT_UNMARKED_NUMBERS
#define JITACT_UNMARKED_NUMBERS 0
#endif
// How many of forward's last broadcast operands always have a single value, as their declaration says.
#ifndef JITACT_SINGLES
#define JITACT_SINGLES 0
#endif

namespace jitact::loops {

enum class Role { element, number, channel, row, random };

// The type of an argument of a role, and the role of a type.
template <typename T, Role role> struct OperandType { using type = T; };
template <typename T> struct OperandType<T, Role::number> { using type = Number<T>; };
template <typename T> struct OperandType<T, Role::channel> { using type = Channel<T>; };
template <typename T> struct OperandType<T, Role::row> { using type = Row<T>; };
template <typename T> struct OperandType<T, Role::random> { using type = Random<T>; };

template <typename A>
constexpr Role role_of() {
  if (std::is_same_v<A, Number<Single>>) return Role::number;
  if (std::is_same_v<A, Channel<Single>>) return Role::channel;
  if (std::is_same_v<A, Row<Single>>) return Role::row;
  if (std::is_same_v<A, Random<Single>>) return Role::random;
  return Role::element;
}

template <int n> struct Roles {
  Role declared[n], of[n];  // by type alone, and with unmarked numbers counted as numbers
};

template <typename R, typename... A>
constexpr Roles<sizeof...(A)> roles_of(R (*)(A...)) {
  constexpr int n = sizeof...(A);
  Roles<n> roles{{role_of<A>()...}, {role_of<A>()...}};
  for (int k = 0; k < JITACT_UNMARKED_NUMBERS; k++) roles.of[n - 1 - k] = Role::number;
  return roles;
}

using Forward = decltype(&::forward<Single>);
constexpr auto kRoles = roles_of(static_cast<Forward>(nullptr));

template <typename R, typename... A>
constexpr int count_arguments(R (*)(A...)) { return sizeof...(A); }
constexpr int kArguments = count_arguments(static_cast<Forward>(nullptr));
constexpr bool kPlain = kArguments == 1;  // whether x is the only argument

constexpr bool is_broadcast(Role role) { return role == Role::channel || role == Role::row; }
constexpr bool is_element(Role role) { return role == Role::element; }
constexpr bool is_other(Role role) { return !is_element(role); }
constexpr bool is_number(Role role) { return role == Role::number; }
constexpr bool is_random(Role role) { return role == Role::random; }
constexpr bool has_gradient(Role role) { return is_element(role) || is_broadcast(role); }

// How many of the first `end` arguments are of a kind.
constexpr int count(bool (*kind)(Role), int end = kArguments) {
  int found = 0;
  for (int k = 0; k < end; k++) found += kind(kRoles.of[k]);
  return found;
}
constexpr int count_elements() {
  if (kPlain) return 1;
  return count(is_element);
}
constexpr int kElements = count_elements();
constexpr int kNumbers = count(is_number);
constexpr int kBroadcast = count(is_broadcast);
constexpr int kRandom = count(is_random);

// The index of argument k among those of its kind.
constexpr int place_of(int k) {
  const Role role = kRoles.of[k];
  if (is_number(role)) return count(is_number, k);
  if (is_broadcast(role)) return count(is_broadcast, k);
  if (is_random(role)) return count(is_random, k);
  return count(is_element, k);
}

// The index of the g-th argument of a kind.
constexpr int argument_of(bool (*kind)(Role), int g) {
  int k = 0;
  while (count(kind, k + 1) <= g) k++;
  return k;
}

template <typename T, size_t k>
using Argument = typename OperandType<T, kRoles.declared[k]>::type;

// The indices of all arguments, and of those that are not elements.
using All = std::make_index_sequence<kArguments>;
template <size_t... J>
constexpr auto list_others(std::index_sequence<J...>) {
  return std::index_sequence<argument_of(is_other, J)...>();
}
using Others = decltype(list_others(std::make_index_sequence<kArguments - kElements>()));

// The return type of a function of the file, or void if the file does not define it. (A requires-expression over a pack is
// always false with nvcc 13.0.)
template <typename T, size_t... K>
auto find_backward(std::index_sequence<K...>, int) -> decltype(backward(std::declval<T>(), std::declval<Argument<T, K>>()...));
template <typename T>
void find_backward(All, ...);

template <typename T, size_t... J>
auto find_from_output(std::index_sequence<J...>, int)
    -> decltype(backward_from_output(std::declval<T>(), std::declval<T>(), std::declval<Argument<T, J>>()...));
template <typename T>
void find_from_output(Others, ...);

template <typename T, size_t... J>
auto find_from_bit(std::index_sequence<J...>, int)
    -> decltype(backward_from_bit(std::declval<T>(), true, std::declval<Argument<T, J>>()...));
template <typename T>
void find_from_bit(Others, ...);

template <typename T, size_t... K>
auto find_keeps(std::index_sequence<K...>, int) -> decltype(keeps(std::declval<Argument<T, K>>()...));
template <typename T>
void find_keeps(All, ...);

using Backward = decltype(find_backward<Single>(All(), 0));
constexpr bool kHasBackward = !std::is_void_v<Backward>;
constexpr bool kSavesOutput = !std::is_void_v<decltype(find_from_output<Single>(Others(), 0))>;
using FromBit = decltype(find_from_bit<Single>(Others(), 0));
constexpr bool kSavesBit = !std::is_void_v<FromBit> && !std::is_void_v<decltype(find_keeps<Single>(All(), 0))>;

// The number of gradients, and how many of them are of elements; the others are summed.
template <typename R> constexpr int kLength = 1;
template <typename T, int n> constexpr int kLength<Many<T, n>> = n;

constexpr int kBitGradients = kSavesBit ? kLength<FromBit> : 0;  // those that the mask bit suffices for
constexpr int kGradients = kHasBackward ? kLength<Backward> : kSavesBit ? kBitGradients : count(has_gradient);
constexpr int gradient_argument(int g) { return argument_of(has_gradient, g); }
constexpr int kElementGradients = count(is_element, gradient_argument(kGradients - 1) + 1);
constexpr int kSums = kGradients - kElementGradients;
constexpr int kBitSums = kSavesBit ? kBitGradients - 1 : 0;
// Whether the gradients of exactly two elements can be written into one tensor: not with random operands, as then sums
// need dense memory.
constexpr bool kPacks = kElements == 2 && kElementGradients == 2 && kRandom == 0;
static_assert(kGradients <= count(has_gradient), "backward returns more gradients than forward has arguments that have one");
static_assert(kBitGradients <= kGradients && count(is_element, gradient_argument(kBitSums) + 1) == 1,
              "backward_from_bit returns the gradient of the first element, and of channels and rows right after it");

// How many of the last broadcast operands the file's prepare takes. (A concept, which nvcc 13.0 evaluates correctly.)
template <typename... T>
concept Prepares = requires(T&... w) { prepare(w...); };
template <typename T, int first, size_t... B>
constexpr bool has_prepare(std::index_sequence<B...>) {
  return Prepares<Argument<T, argument_of(is_broadcast, first + B)>...>;
}
template <int n>
constexpr int count_prepared() {
  if constexpr (n == 0) return 0;
  else if constexpr (has_prepare<Single, kBroadcast - n>(std::make_index_sequence<n>())) return n;
  else return count_prepared<n - 1>();
}
constexpr int kPrepared = count_prepared<kBroadcast>();
constexpr int kUnprepared = kBroadcast - kPrepared;  // the operands before them
constexpr bool kPrepares = kPrepared > 0;
// Those that prepare takes have a single value each. The first kMany operands may have many.
constexpr int kSingles = kPrepared > JITACT_SINGLES ? kPrepared : JITACT_SINGLES;
constexpr int kMany = kBroadcast - kSingles;

template <typename T, size_t... B>
JITACT_INLINE void prepare_all(T* w, std::index_sequence<B...>) {
  const auto on = [&](Argument<T, argument_of(is_broadcast, kUnprepared + B)>... prepared) {
    prepare(prepared...);
    ((w[B] = prepared), ...);
  };
  on(w[B]...);
}
// Replaces the last kPrepared operands by what the file's functions expect.
template <typename T>
JITACT_INLINE void prepare_all(T* w) {
  if constexpr (kPrepares) prepare_all(w, std::make_index_sequence<kPrepared>());
}
// In Single, though Narrow suffices for 16-bit results: where terms cancel, errors of operands show, and this runs rarely.
JITACT_INLINE void prepare_all(Narrow* w) {
  Single full[kPrepared + 1];
  for (int b = 0; b < kPrepared; b++) full[b] = w[b].v;
  prepare_all(full);
  for (int b = 0; b < kPrepared; b++) w[b] = full[b].v;
}

// The derivative of prepared operand b by the original operand b; `operands` are the original values of those prepared.
template <typename T>
JITACT_INLINE T prepare_slope(const T* operands, int b) {
  if constexpr (!kPrepares) return 1;
  if (b < kUnprepared) return 1;
  Dual<T> w[kPrepared + 1];
  for (int i = 0; i < kPrepared; i++) w[i] = Dual<T>(operands[i], T(kUnprepared + i == b ? 1 : 0));
  prepare_all(w);
  T slope = 0;
  for (int i = 0; i < kPrepared; i++) slope = kUnprepared + i == b ? w[i].derivative : slope;
  return slope;
}

}  // namespace jitact::loops
