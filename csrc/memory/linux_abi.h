// Kernel constants that the C library of a manylinux_2_28 image does not know yet. The values are kernel ABI.
#pragma once

namespace mc2::linux_abi {

inline constexpr int kMadvPopulateRead = 22;      // Linux 5.14
inline constexpr int kMadvPopulateWrite = 23;     // Linux 5.14
inline constexpr int kMadvCollapse = 25;          // Linux 6.1
inline constexpr int kSealFutureWrite = 0x0010;   // Linux 5.1
inline constexpr unsigned kMemfdNoexecSeal = 8U;  // Linux 6.3
inline constexpr unsigned kMemfdHuge2Mb = 21U << 26U;
inline constexpr long kHugetlbfsMagic = 0x958458f6;

}  // namespace mc2::linux_abi
