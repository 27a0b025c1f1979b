//! How each lane sent its pages, for people and for machines.

use serde_json::{Value, json};
use towline_migration::{LaneSends, SendReason, SendWay, Tally};

use crate::units::count;

/// One line for all lanes that did alike; none where there was nothing to choose.
pub(crate) fn lines(lanes: &[LaneSends]) -> Vec<String> {
    let mut alike: Vec<(SendWay, SendReason, Vec<&LaneSends>)> = Vec::new();
    for lane in lanes.iter().filter(|lane| is_of_interest(lane)) {
        match alike.iter_mut().find(|(way, reason, _)| (*way, *reason) == (lane.way, lane.reason)) {
            Some((_, _, lanes)) => lanes.push(lane),
            None => alike.push((lane.way, lane.reason, vec![lane])),
        }
    }
    alike.iter().map(|(way, reason, lanes)| line(*way, *reason, lanes)).collect()
}

/// An object for each lane.
pub(crate) fn json(lanes: &[LaneSends]) -> Value {
    let lane = |(number, lane): (usize, &LaneSends)| {
        json!({
            "lane": number,
            "mode": lane.way.to_string(),
            "reason": lane.reason.to_string(),
            "switches": lane.switches,
            "plain": tally(&lane.plain),
            "zero-copy": tally(&lane.zero_copy),
            "sends-zero-copied": lane.zero_copied,
            "sends-copied": lane.copied,
        })
    };
    lanes.iter().enumerate().map(lane).collect()
}

/// Not one that was told to send plainly, or could nothing else.
fn is_of_interest(lane: &LaneSends) -> bool {
    let is_choice = !matches!(lane.reason, SendReason::Unsupported | SendReason::Compressed);
    is_choice && (lane.way, lane.reason) != (SendWay::Plain, SendReason::Asked)
}

fn line(way: SendWay, reason: SendReason, lanes: &[&LaneSends]) -> String {
    let sum = |of: fn(&LaneSends) -> u64| count(lanes.iter().map(|lane| of(lane)).sum());
    let mut line = format!(
        "{} {way}: {reason}; {} packets plain, {} zero-copy",
        lanes.len(),
        sum(|lane| lane.plain.packets),
        sum(|lane| lane.zero_copy.packets)
    );
    let (sent, copied) = (lanes.iter().map(|lane| lane.zero_copied).sum::<u64>(), sum(|lane| lane.copied));
    if lanes.iter().any(|lane| lane.zero_copy.packets > 0) {
        line.push_str(&format!(" (kernel: {} not copied, {copied} copied)", count(sent)));
    }
    let cost = |of: fn(&LaneSends) -> Tally| {
        let all = lanes.iter().map(|lane| of(lane)).fold(Tally::default(), Tally::plus);
        all.cpu_ms_per_gb().map_or_else(|| "?".to_owned(), |cost| format!("{cost:.0}"))
    };
    line.push_str(&format!("; {} | {} ms CPU/GB", cost(|lane| lane.plain), cost(|lane| lane.zero_copy)));
    line
}

fn tally(tally: &Tally) -> Value {
    json!({
        "packets": tally.packets,
        "cpu-ns-per-packet": tally.cpu_ns_per_packet(),
        "cpu-ms-per-gb": tally.cpu_ms_per_gb(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_did_alike_share_a_line() {
        let packets = |packets| Tally { packets, ..Tally::default() };
        let measured = Tally {
            packets: 30,
            bytes: 15_000_000,
            measured_packets: 2,
            measured_bytes: 1_000_000,
            measured_cpu_ns: 50_000,
        };
        let copied = LaneSends {
            reason: SendReason::Copied,
            plain: measured,
            zero_copy: packets(1),
            copied: 1,
            ..LaneSends::default()
        };
        let spared = LaneSends {
            way: SendWay::ZeroCopy,
            reason: SendReason::CostsLess,
            zero_copy: packets(1234),
            zero_copied: 1235,
            switches: 1,
            ..LaneSends::default()
        };
        let unsupported = LaneSends { reason: SendReason::Unsupported, ..LaneSends::default() };
        let lines = lines(&[copied, spared, copied, unsupported, LaneSends::default()]);
        assert_eq!(
            lines,
            [
                format!(
                    "2 plain: {}; 60 packets plain, 2 zero-copy (kernel: 0 not copied, 2 copied); 50 | ? ms CPU/GB",
                    SendReason::Copied
                ),
                format!(
                    "1 zero-copy: {}; 0 packets plain, {} zero-copy (kernel: {} not copied, 0 copied); ? | ? ms CPU/GB",
                    SendReason::CostsLess,
                    count(1234),
                    count(1235)
                ),
            ]
        );
        let json = json(&[copied]);
        assert_eq!(json[0]["plain"]["cpu-ns-per-packet"], 25_000);
        assert_eq!(json[0]["mode"], "plain");
    }
}
