//! The fixtures, read.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use flate2::read::GzDecoder;

/// One line of a trace.
#[derive(Clone, Debug)]
pub struct Request {
    /// Milliseconds since the trace began.
    pub millis: u64,
    pub input: usize,
    pub output: usize,
    /// Numbers of blocks of 512 tokens; empty where the trace has none.
    pub blocks: Vec<u32>,
}

/// A fixture by name; its README has the format.
pub fn read(name: &str) -> Vec<Request> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/traces");
    let file = File::open(folder.join(format!("{name}.csv.gz"))).unwrap();
    let (mut millis, mut fresh) = (0, 0);
    let mut requests = Vec::new();
    for line in BufReader::new(GzDecoder::new(file)).lines() {
        let line = line.unwrap();
        let fields: Vec<&str> = line.split(',').collect();
        let &[wait, input, output, blocks] = &fields[..] else { panic!("{line}") };
        millis += wait.parse::<u64>().unwrap();
        let blocks = blocks_of(blocks, &mut fresh);
        let (input, output) = (input.parse().unwrap(), output.parse().unwrap());
        assert!(blocks.is_empty() || blocks.len() == usize::div_ceil(input, 512));
        requests.push(Request { millis, input, output, blocks });
    }
    requests
}

fn blocks_of(text: &str, fresh: &mut u32) -> Vec<u32> {
    let mut blocks = Vec::new();
    for run in text.split_whitespace() {
        let (first, count) = match run.split_once('.') {
            Some((first, count)) => (first.parse().unwrap(), count.parse::<u32>().unwrap()),
            None => {
                let count = run.strip_prefix('+').unwrap().parse::<u32>().unwrap();
                *fresh += count;
                (*fresh - count, count)
            }
        };
        blocks.extend(first..first + count);
    }
    blocks
}
