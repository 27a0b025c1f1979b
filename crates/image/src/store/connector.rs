//! The stores' HTTP client: hyper over rustls, HTTP/1.1, with the host's certificate authorities.
//!
//! Does not follow redirects, use proxies, or retry, which `object_store` does.

use std::error::Error as StdError;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as TcpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};

use super::error::{CutListing, xml_field};
use super::lease_state::LeaseGuard;
use super::{CHUNK_BYTES, RETRY_TIMEOUT};

/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of a response after its request was sent, and of each part of its body after the previous one.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// Rate at which a request is sent at least: others, also of other processes, are sent over the same link.
const SENT_BYTES_PER_SECOND_MIN: u64 = 16 << 10;
// A chunk that is not answered in time is sent again: no request is after this time.
const _: () = assert!(
    CHUNK_BYTES / SENT_BYTES_PER_SECOND_MIN + RESPONSE_TIMEOUT.as_secs() < RETRY_TIMEOUT.as_secs(),
    "a chunk would be sent once"
);
/// Maximum time for sending a request.
const SENDING_TIMEOUT: Duration = Duration::from_secs(2 * 60);
/// Parameter of the requests that list objects.
const LISTING: &str = "list-type=2";
/// Time for which an idle connection is kept.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Creates clients.
#[derive(Debug)]
pub(super) struct Connector {
    guard: LeaseGuard,
    timeout: Duration,
}

impl Connector {
    /// A connector whose clients check modifying requests with `guard`.
    pub(super) fn new(guard: LeaseGuard) -> Self {
        Self { guard, timeout: RESPONSE_TIMEOUT }
    }
}

#[derive(Debug)]
struct Service {
    guard: LeaseGuard,
    timeout: Duration,
    client: Client<HttpsConnector<TcpConnector>, HttpRequestBody>,
}

/// Error of a server that does not respond.
#[derive(Debug, thiserror::Error)]
#[error("no response within {} s", .0.as_secs())]
struct ResponseTimeout(Duration);

/// Waits for a part of a response.
async fn within<T>(limit: Duration, part: impl Future<Output = T>) -> Result<T, HttpError> {
    let timed_out = |_| HttpError::new(HttpErrorKind::Timeout, ResponseTimeout(limit));
    tokio::time::timeout(limit, part).await.map_err(timed_out)
}

/// Time that may pass while a request of this length is sent.
fn sending_time(bytes: usize) -> Duration {
    Duration::from_secs(bytes as u64 / SENT_BYTES_PER_SECOND_MIN).min(SENDING_TIMEOUT)
}

/// Returns true if a response of S3's ListObjectsV2, which Google's stores have too, is the last one and says
/// so, or names the next one.
///
/// Some servers ignore `list-type=2`, or have no token: their list ends after a thousand objects, and seems
/// complete.
fn is_whole(response: &str) -> bool {
    let field = |name| xml_field(response, name);
    let is_last = field("IsTruncated") == Some("false") && field("NextMarker").is_none();
    field("NextContinuationToken").is_some() || is_last
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allows_http = options.get_config_value(&ClientConfigKey::AllowHttp).as_deref() == Some("true");
        let mut roots = rustls::RootCertStore::empty();
        // Without authorities an unencrypted server can still be used.
        let (added, ignored) =
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        tracing::debug!(added, ignored, "certificate authorities");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls =
            tls.map_err(|source| object_store::Error::Generic { store: "TLS", source: Box::new(source) })?;
        let tls = tls.with_root_certificates(roots).with_no_client_auth();
        let mut tcp = TcpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let builder = HttpsConnectorBuilder::new().with_tls_config(tls);
        let builder = if allows_http { builder.https_or_http() } else { builder.https_only() };
        let https = builder.enable_http1().wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .build(https);
        Ok(HttpClient::new(Service { guard: self.guard.clone(), timeout: self.timeout, client }))
    }
}

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if !request.method().is_safe() {
            // An error of this kind is not retried.
            self.guard.check().map_err(|lost| HttpError::new(HttpErrorKind::Unknown, lost))?;
        }
        let is_listing = request.uri().query().is_some_and(|query| query.contains(LISTING));
        let limit = self.timeout + sending_time(request.body().content_length());
        let response = within(limit, self.client.request(request)).await?.map_err(|error| {
            let kind = if error.is_connect() { HttpErrorKind::Connect } else { kind(&error) };
            HttpError::new(kind, error)
        })?;
        let (parts, body) = response.into_parts();
        // A connection that is dead without a reset would be waited for without end.
        let limit = self.timeout;
        let body = stream::try_unfold(body, move |mut body| async move {
            let part = within(limit, body.frame()).await?.transpose();
            let part = part.map_err(|error| HttpError::new(kind(&error), error))?;
            Ok(part.map(|part| (part, body)))
        });
        let body = HttpResponseBody::new(StreamBody::new(body));
        if !is_listing || !parts.status.is_success() {
            return Ok(HttpResponse::from_parts(parts, body));
        }
        let bytes = body.bytes().await?;
        if !is_whole(&String::from_utf8_lossy(&bytes)) {
            // As above.
            return Err(HttpError::new(HttpErrorKind::Unknown, CutListing));
        }
        Ok(HttpResponse::from_parts(parts, bytes.into()))
    }
}

/// Kind of an error, which decides if the request is retried.
fn kind(error: &(dyn StdError + 'static)) -> HttpErrorKind {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<hyper::Error>() {
            if error.is_timeout() {
                return HttpErrorKind::Timeout;
            }
            if error.is_closed() || error.is_incomplete_message() || error.is_body_write_aborted() {
                return HttpErrorKind::Request;
            }
        }
        if error.downcast_ref::<std::io::Error>().is_some() {
            return HttpErrorKind::Interrupted;
        }
        cause = error.source();
    }
    HttpErrorKind::Unknown
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::super::lease_state::LeaseState;
    use super::super::runtime::Clock;
    use super::*;

    #[test]
    fn only_a_listing_that_says_so_is_whole() {
        let whole = "<ListBucketResult><IsTruncated>false</IsTruncated><Contents/></ListBucketResult>";
        let next = "<IsTruncated>true</IsTruncated><NextContinuationToken>abc</NextContinuationToken>";
        assert!(is_whole(whole) && is_whole(next));
        for cut in [
            "<IsTruncated>true</IsTruncated>",
            "<IsTruncated>true</IsTruncated><NextContinuationToken></NextContinuationToken>",
            "<IsTruncated>true</IsTruncated><NextMarker>vm/b</NextMarker>",
            "<IsTruncated>false</IsTruncated><NextMarker>vm/b</NextMarker>",
            "<ListBucketResult><Contents/></ListBucketResult>",
        ] {
            assert!(!is_whole(cut), "{cut}");
        }
    }

    /// The error of a request to a port without a listener.
    async fn error_of(client: &HttpClient, method: hyper::Method) -> String {
        let request = hyper::Request::builder().method(method).uri("http://127.0.0.1:9/vm/chunks/aa");
        let error = client.execute(request.body(HttpRequestBody::empty()).unwrap()).await.unwrap_err();
        let mut cause: Option<&dyn StdError> = Some(&error);
        let mut text = String::new();
        while let Some(error) = cause {
            text += &format!("{error}: ");
            cause = error.source();
        }
        text
    }

    /// Requests of a client that waits for 200 ms, to a server that reads this many bytes, responds after a pause and does not close its
    /// connection.
    async fn response_of(method: hyper::Method, sent: usize, pause: Duration) -> Result<usize, HttpError> {
        use std::io::{Read as _, Write as _};

        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let uri = format!("http://{}/vm/a", server.local_addr().unwrap());
        let (ended, end) = std::sync::mpsc::channel::<()>();
        let serving = std::thread::spawn(move || {
            let (mut client, _) = server.accept().unwrap();
            let (mut read, mut buffer) = (Vec::new(), [0; 4096]);
            while !read.windows(4).any(|end| end == b"\r\n\r\n") || read.len() < sent {
                let length = client.read(&mut buffer).unwrap();
                read.extend_from_slice(&buffer[..length]);
            }
            std::thread::sleep(pause);
            let content = if sent > 0 { "first part" } else { "first" };
            let response = format!("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{content}");
            client.write_all(response.as_bytes()).unwrap();
            end.recv().unwrap_err();
        });
        let connector = Connector { guard: LeaseGuard::default(), timeout: Duration::from_millis(200) };
        let client = connector.connect(&ClientOptions::new().with_allow_http(true)).unwrap();
        let request = hyper::Request::builder().method(method).uri(uri).body(vec![7; sent].into()).unwrap();
        let response = async { client.execute(request).await?.into_body().bytes().await };
        let response = tokio::time::timeout(Duration::from_secs(60), response).await;
        drop(ended);
        serving.join().unwrap();
        response.expect("the client does not wait without end").map(|bytes| bytes.len())
    }

    #[test]
    fn a_response_that_stops_is_an_error() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let stopped = runtime.block_on(response_of(hyper::Method::GET, 0, Duration::ZERO)).unwrap_err();
        assert_eq!(stopped.kind(), HttpErrorKind::Timeout, "{stopped}");
    }

    #[test]
    fn a_request_has_the_time_that_sending_it_takes() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let slow = response_of(hyper::Method::PUT, 256 << 10, Duration::from_millis(600));
        assert_eq!(runtime.block_on(slow).unwrap(), 10);
        assert_eq!(sending_time(256 << 20), SENDING_TIMEOUT);
    }

    #[test]
    fn no_modifying_request_is_sent_after_the_lease_was_lost() {
        let lease_state =
            Arc::new(LeaseState::new("s3://b/vm".into(), Clock::System, Clock::System.now(), None));
        let guard = LeaseGuard::default();
        guard.require(&lease_state);
        let options = ClientOptions::new().with_allow_http(true);
        let client = Connector::new(guard).connect(&options).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            use hyper::Method;

            let changes = [Method::PUT, Method::DELETE, Method::POST];
            for method in changes.clone() {
                assert!(!error_of(&client, method).await.contains("lease"));
            }
            lease_state.mark_lost("it was removed".into());
            for method in changes {
                let error = error_of(&client, method).await;
                assert!(error.contains("the lease of this process was lost: it was removed"), "{error}");
            }
            assert!(!error_of(&client, Method::GET).await.contains("lease"));
        });
    }
}
