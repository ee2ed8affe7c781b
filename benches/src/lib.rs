//! Benchmarks of kvlane's index and decision, beside its peers.
//!
//! # How a run goes
//! [`driver`] starts one process for each subject, part and round, so that no subject meets the heap or the caches of
//! another, and changes their order from round to round. A process builds the [`workload`] from a seed, hands it to the
//! [`subject`] in the subject's own types, measures one [`measure::Part`], and prints one JSON object. [`report`] takes
//! medians over rounds and makes the table.
//!
//! # What is timed
//! Writes by the CPU time of the thread that applies them, to completion: a subject with a thread of its own is drained
//! before the clock is read. Lookups one by one by the wall clock (about 25 ns of which is the clock) for percentiles, and
//! back to back by CPU time for the mean. Converting events and prompts to a subject's types is never timed. Live heap is
//! what an allocator counts, in a binary of its own, since counting costs time.

pub mod clock;
pub mod driver;
pub mod heap;
pub mod measure;
pub mod probes;
pub mod report;
pub mod subject;
pub mod workload;
