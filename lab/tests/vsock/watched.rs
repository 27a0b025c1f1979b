//! A device with a guest, queried over its control socket and scraped.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use serde_json::json;
use towline_lab::{Qmp, Version, require_lab, scrape, wait_until};

use crate::support::{CID, Fixture, WITHIN};

#[test]
fn each_connection_is_counted() {
    if !require_lab("each_connection_is_counted") {
        return;
    }
    let scratch = tempfile::TempDir::with_prefix("towline-lab-").unwrap();
    let control = scratch.path().join("control");
    let metrics = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let more = ["--qmp", control.to_str().unwrap(), "--metrics", &metrics.to_string()];
    let mut fixture = Fixture::new(Version::V10_0, &more);
    fixture.perl("echo", "listen stream 5001 echo");
    let mut stream = fixture.connect(5001);
    stream.write_all(&[7; 5000]).unwrap();
    stream.read_exact(&mut [0; 5000]).unwrap();

    let qmp = Qmp::connect(&control, WITHIN).unwrap();
    let status = qmp.execute("query-status", json!({})).unwrap();
    assert_eq!(status, json!({ "running": true, "status": "running" }));
    // A thread that was not scheduled reports its previous values.
    wait_until("a connection that is counted", WITHIN, || {
        let stats = qmp.execute("query-stats", json!({ "target": "vsock-connection" }))?;
        let path = stats[0]["qom-path"].as_str().unwrap_or_default();
        let numbers = stats[0]["stats"].as_array().into_iter().flatten();
        let number = |name: &str| {
            numbers.clone().find(|one| one["name"] == name).and_then(|one| one["value"].as_u64())
        };
        let both = ["to-guest-bytes", "to-host-bytes"].map(number);
        Ok((path.starts_with(&format!("/vsock-connection/{CID}/stream/5001/2/")) && both == [Some(5000); 2])
            .then_some(()))
    })
    .unwrap();

    let connections = format!("towline_vsock_connections{{guest=\"{CID}\"}}");
    wait_until("its metrics", WITHIN, || {
        let scraped = scrape(metrics, WITHIN)?;
        let bytes = scraped.sum("towline_vsock_connection_to_guest_bytes_total");
        Ok((scraped.get(&connections) == Some(1.0) && bytes >= 5000.0).then_some(()))
    })
    .unwrap();
    let version = qmp.execute("query-migration-version", json!({})).unwrap();
    assert_eq!(qmp.execute("check-migration-version", version).unwrap(), json!({}));
}
