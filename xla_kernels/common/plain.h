// What module.h gives Python, as a table of plain C. It holds nothing of an interpreter's ABI, so one library serves
// all interpreters. plain.py reads it by ctypes: its structures are these, field by field.
#pragma once

#include <cstdint>

#include "xla_kernels/common/registration.h"

namespace jax_rnnt {

struct PlainDevice {
  int32_t major, minor;
  int64_t shared_bytes;
};

struct PlainTable {
  const char* kernels;  // the device that they are written for
  int32_t api_major, api_minor;
  const Registration* registrations;
  int64_t num_registrations;
  const Limit* limits;
  int64_t num_limits;
  // Writes the three terms; those without elements count for nothing.
  void (*workspace)(bool unit_steps, int64_t num_arcs, bool gradient, WorkspaceTerm* terms);
  // CPU kernels; null in others.
  const char* const* (*targets)() = nullptr;
  const char* (*target)() = nullptr;
  bool (*use_target)(const char* name) = nullptr;
  // CUDA kernels; null in others.
  const char* architectures = nullptr;
  int32_t runtime_version = 0;
  int32_t (*driver_version)() = nullptr;
  // Their number; writes at most `room` of them.
  int32_t (*devices)(PlainDevice* devices, int32_t room) = nullptr;
  int64_t (*unit_columns)(int64_t shared_bytes) = nullptr;
};

inline PlainTable CommonTable(const char* kernels) {
  static const std::vector<Registration> registrations = Registrations();
  static const std::vector<Limit> limits = Limits();
  PlainTable table{};
  table.kernels = kernels;
  table.api_major = ApiVersion().first;
  table.api_minor = ApiVersion().second;
  table.registrations = registrations.data();
  table.num_registrations = static_cast<int64_t>(registrations.size());
  table.limits = limits.data();
  table.num_limits = static_cast<int64_t>(limits.size());
  table.workspace = [](bool unit_steps, int64_t num_arcs, bool gradient, WorkspaceTerm* terms) {
    for (const WorkspaceTerm& term : WorkspaceOfLattice(unit_steps, num_arcs, gradient).terms) *terms++ = term;
  };
  return table;
}

}  // namespace jax_rnnt

// The one symbol of the library.
extern "C" __attribute__((visibility("default"))) const jax_rnnt::PlainTable* jax_rnnt_table();
