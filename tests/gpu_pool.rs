//! Promise: the pool on a GPU is the pool on the CPU. The same interleavings, with both arrangements of pages.
#![cfg(feature = "cuda")]

mod pool_cases;
mod pool_entry;

use candle_core::Device;
use oscar_kv::kv::page::Arrangement;
use oscar_kv::kv::pool::Pool;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use pool_cases::{Promise, cases, run};

#[test]
fn the_gpu_pool_is_a_list_of_tokens() {
    if oscar_kv::cuda::count() == 0 {
        eprintln!("skipped: no GPU");
        return;
    }
    let device = oscar_kv::cuda::open(0).unwrap();
    let Device::Cuda(cuda) = &device else {
        panic!("not a GPU")
    };
    let promise = Promise {
        device: &device,
        tolerance: 0.02,
        exact: false,
    };
    let mut runner = TestRunner::deterministic();
    for number in 0..24 {
        let case = cases().new_tree(&mut runner).unwrap().current();
        for arrangement in [Arrangement::Rows, Arrangement::Mma] {
            if case.layout(arrangement).is_none() {
                continue;
            }
            println!("case {number}, {arrangement:?}: {case:?}");
            let make = |shape, capacity| Pool::cuda(cuda, shape, capacity, arrangement).unwrap();
            run(&case, &make, promise);
        }
    }
}
