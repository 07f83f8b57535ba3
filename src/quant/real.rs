use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

use half::bf16;

/// f32 (what the cache runs on) or f64 (what fitting checks against).
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    fn from_f64(x: f64) -> Self;
    /// Exact.
    fn from_bf16(x: bf16) -> Self;
    /// Exact.
    fn from_i32(x: i32) -> Self;
    fn to_f32(self) -> f32;
    #[must_use]
    fn floor(self) -> Self;
    /// Of a whole number from 0 to 255. A cast with `as` checks every element for NaN and range, one at a time.
    fn to_u8(self) -> u8;

    fn to_bf16(self) -> bf16 {
        bf16::from_f32(self.to_f32())
    }

    #[inline(always)]
    #[must_use]
    fn abs(self) -> Self {
        self.at_least(-self)
    }

    /// The larger one; `self` NaN gives `floor`.
    #[inline(always)]
    #[must_use]
    fn at_least(self, floor: Self) -> Self {
        if self > floor { self } else { floor }
    }

    /// The smaller one; `self` NaN gives `ceiling`.
    #[inline(always)]
    #[must_use]
    fn at_most(self, ceiling: Self) -> Self {
        if self < ceiling { self } else { ceiling }
    }
}

impl Real for f32 {
    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x as f32
    }
    #[inline(always)]
    fn from_bf16(x: bf16) -> Self {
        x.to_f32()
    }
    #[inline(always)]
    fn from_i32(x: i32) -> Self {
        x as f32
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn floor(self) -> Self {
        f32::floor(self)
    }
    #[inline(always)]
    fn to_u8(self) -> u8 {
        (self + 8_388_608.0).to_bits() as u8
    }
}

impl Real for f64 {
    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x
    }
    #[inline(always)]
    fn from_bf16(x: bf16) -> Self {
        x.to_f64()
    }
    #[inline(always)]
    fn from_i32(x: i32) -> Self {
        f64::from(x)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn floor(self) -> Self {
        f64::floor(self)
    }
    #[inline(always)]
    fn to_u8(self) -> u8 {
        (self + 4_503_599_627_370_496.0).to_bits() as u8
    }
}
