//! Key updates on an established connection, against rustls' own end: it requests them and accepts ours.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, credentials, pattern, recv_exact, send_all, soon};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::version::TLS13;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use towline_channel::{ConnectOptions, TlsClient, connect_with};

const ROUNDS: usize = 20;
/// Several records, the last not full.
const BYTES: usize = 100_000;

/// rustls' next record is under a new key, and requests an update from us: it could not read records under
/// the old one.
#[test]
fn keys_are_renewed_when_the_peer_renews_its_own() {
    let directory = credentials();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let data = pattern(BYTES);
    std::thread::scope(|scope| {
        let far = scope.spawn(|| {
            let mut far = rustls_server(directory.path(), listener.accept().unwrap().0);
            for _ in 0..ROUNDS {
                let mut received = vec![0; BYTES];
                far.read_exact(&mut received).unwrap();
                assert!(received == data);
                far.conn.refresh_traffic_keys().unwrap();
                far.write_all(&received).unwrap();
                far.flush().unwrap();
            }
            // Until the other end has read everything: closed over what was not read here, the connection
            // would be reset.
            let _ = far.sock.read_to_end(&mut Vec::new());
        });
        let tls = TlsClient::load(directory.path(), Some("localhost")).unwrap();
        let options = ConnectOptions { tls: Some(tls), ..Default::default() };
        let near = connect_with(&address.parse().unwrap(), soon(), &cancel(), &options).unwrap();
        for round in 0..ROUNDS {
            send_all(near.as_ref(), &data).unwrap();
            assert!(recv_exact(near.as_ref(), BYTES).unwrap() == data, "round {round}");
        }
        drop(near);
        far.join().unwrap();
    });
}

fn rustls_server(directory: &Path, socket: TcpStream) -> StreamOwned<ServerConnection, TcpStream> {
    let chain = vec![CertificateDer::from_pem_file(directory.join("server-cert.pem")).unwrap()];
    let key = PrivateKeyDer::from_pem_file(directory.join("server-key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), socket)
}
