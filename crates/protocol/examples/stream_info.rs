//! Prints the contents of a migration stream without lanes, as `migrate "exec:cat >FILE"` of a QEMU writes
//! it: `cargo run -p towline-protocol --example stream_info < FILE`

use std::io::Read as _;

use towline_protocol::destination::{StreamDecoder, StreamItem};
use towline_protocol::device_state::Collector;
use towline_protocol::ram::PAGE_SIZE;
use towline_protocol::wire::Reader;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Number of records of each kind.
#[derive(Default)]
struct Counts {
    pages: u64,
    zero_pages: u64,
    xbzrle: u64,
}

fn main() -> Result<()> {
    // A program that receives a guest decodes what has arrived and keeps the rest; this one has the whole
    // stream.
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes)?;
    let mut input = Reader::new(&bytes);
    let counts = read_memory(&mut input)?;
    println!("{} pages, {} zero pages, {} XBZRLE pages", counts.pages, counts.zero_pages, counts.xbzrle);

    let mut state = Collector::default();
    state.push(input.rest())?;
    let state = state.complete()?.ok_or_else(|| state.truncated())?;
    for device in state.devices() {
        let length = state.content(device).len();
        println!("device {} {}: version {}, {length} bytes", device.name, device.instance, device.version);
    }
    Ok(())
}

/// Decodes everything before the device state.
fn read_memory(input: &mut Reader<'_>) -> Result<Counts> {
    let (mut counts, mut machine) = (Counts::default(), StreamDecoder::default());
    loop {
        let (next, event) = machine.handle(input)?;
        match event {
            None => return Err(format!("the stream ends in {}", next.awaits()).into()),
            Some(StreamItem::Configuration(found)) => println!("machine {}", found.machine_type),
            Some(StreamItem::Block(block)) => println!("block {}: {} bytes", block.name, block.length),
            Some(StreamItem::Page(_)) => {
                // The page itself is not for the machine; a real destination receives it in guest memory.
                input.take(PAGE_SIZE as usize).map_err(|_| "the stream ends inside a page")?;
                counts.pages += 1;
            }
            Some(StreamItem::ZeroPage(_)) => counts.zero_pages += 1,
            Some(StreamItem::Xbzrle { .. }) => counts.xbzrle += 1,
            Some(StreamItem::DeviceState) => return Ok(counts),
            Some(_) => {}
        }
        machine = next;
    }
}
