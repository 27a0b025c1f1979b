//! A card with a guest that has an open connection: queried over its control socket, scraped, and its link
//! taken down.

use std::net::{SocketAddr, UdpSocket};

use serde_json::{Value, json};
use towline_lab::{Qmp, Version, scrape, wait_until};

use crate::support::{
    ECHO, EchoClient, Fixture, GUEST, HOST, WITHIN, add_tap, boot, builder, card, guest_address, path, shell,
};

/// Reads a number of a queue over the control socket.
fn number(qmp: &Qmp, queue: &str, name: &str) -> u64 {
    let only = json!({ "providers": [{ "provider": "towline", "names": [name] }], "target": "net-queue" });
    let stats = qmp.execute("query-stats", only).unwrap();
    let found =
        stats.as_array().unwrap().iter().find(|one| one["qom-path"] == *format!("/net-queue/tap0/{queue}/0"));
    found
        .and_then(|one| one["stats"][0]["value"].as_u64())
        .unwrap_or_else(|| panic!("no {name} of {queue}: {stats}"))
}

#[test]
fn a_card_reports_its_queues_and_takes_its_link_down() {
    let name = "a_card_reports_its_queues_and_takes_its_link_down";
    let Some(Fixture { network, scratch }) = Fixture::new(name) else { return };
    add_tap(&network, 1);
    let (socket, control) = (path(&scratch, "net.sock"), path(&scratch, "net.qmp"));
    let watched = ["--tap", "tap0", "--qmp", control.to_str().unwrap(), "--metrics", "127.0.0.1:9"];
    let _card = card(&network, &socket, &watched);
    let (_qemu, mut guest) = boot(&builder(Version::V10_0, &socket, 1));
    let client = EchoClient::begin(&network, guest_address(GUEST));
    client.wait_blocks(4);

    let qmp = Qmp::connect(&control, WITHIN).unwrap();
    let status = qmp.execute("query-status", Value::Null).unwrap();
    assert_eq!(status, json!({ "running": true, "status": "running" }));
    for queue in ["rx", "tx"] {
        assert!(number(&qmp, queue, "bytes") > 4 * (16 << 10), "{queue}");
        assert_eq!(number(&qmp, queue, "dropped-link-down"), 0, "{queue}");
    }
    let facts = qmp.execute("query-device-facts", Value::Null).unwrap();
    let taken = facts["subject"]["negotiated"].as_array().unwrap();
    assert!(taken.contains(&json!("VIRTIO_NET_F_MRG_RXBUF")), "{facts}");

    qmp.execute("set_link", json!({ "name": "tap0", "up": false })).unwrap();
    let host = network.enter(|| UdpSocket::bind((HOST, 0)).unwrap()).unwrap();
    wait_until("frames that are thrown away, both ways", WITHIN, || {
        host.send_to(b"anybody?", SocketAddr::new(GUEST.parse()?, ECHO))?;
        shell(&mut guest, &format!("ping -c 1 -W 1 {HOST} > /dev/null; true"));
        Ok(["rx", "tx"].iter().all(|queue| number(&qmp, queue, "dropped-link-down") > 0).then_some(()))
    })
    .unwrap();
    let scraped = network.enter(|| scrape(SocketAddr::from(([127, 0, 0, 1], 9)), WITHIN)).unwrap().unwrap();
    assert_eq!(scraped.get("towline_net_link{tap=\"tap0\"}"), Some(0.0), "{scraped:?}");
    assert!(scraped.sum("towline_net_queue_dropped_link_down_total") >= 2.0, "{scraped:?}");

    qmp.execute("set_link", json!({ "name": "tap0", "up": true })).unwrap();
    client.wait_blocks(4);
    client.end();
}
