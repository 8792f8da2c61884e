// The loop of an exchange over keuss: reserve, a regular expression on a header, two pushes, commit.
//
// node loop.js '{"backend": "postgres" or "redis-oq", "options": {…}, "loops": 16}', in a folder
// where keuss is installed. Each line of the input is the number of elements to push and then to
// route. The answer is a line with the seconds of the routing. All queues are then emptied.

'use strict';

const { createRequire } = require('module');
const { createInterface } = require('readline');
const { promisify } = require('util');

const { backend, options, loops } = JSON.parse(process.argv[2]);
const installed = createRequire(process.cwd() + '/');
const BODY = 'x'.repeat(1000);
const HEADERS = { country: 'de' };

async function open() {
  const factory = await promisify(installed(`keuss/backends/${backend}`))(options);
  const make = promisify(factory.queue.bind(factory));
  const queue = async (name, pattern) => {
    const made = await make(name, {});
    return {
      pattern,
      push: promisify(made.push.bind(made)),
      commit: promisify(made.ok.bind(made)),
      reserve: () => new Promise((resolve, reject) => {
        made.pop('loop', { reserve: true }, (error, element) => error ? reject(error) : resolve(element));
      }),
    };
  };
  return {
    factory,
    source: await queue('source'),
    targets: [await queue('west', /^(it|de|fr)$/), await queue('north', /^(de|nl|dk)$/)],
  };
}

async function fill(source, count) {
  let left = count;
  const push = async () => {
    while (left-- > 0) await source.push(BODY, { hdrs: HEADERS });
  };
  await Promise.all(Array.from({ length: loops }, push));
}

async function route({ source, targets }, count) {
  let left = count;
  let copies = 0;
  const loop = async () => {
    while (left-- > 0) {
      const element = await source.reserve();
      const chosen = targets.filter(({ pattern }) => pattern.test(element.hdrs.country));
      await Promise.all(chosen.map(({ push }) => push(element.payload, { hdrs: element.hdrs })));
      if (!await source.commit(element)) throw new Error('not committed');
      copies += chosen.length;
    }
  };
  const begun = process.hrtime.bigint();
  await Promise.all(Array.from({ length: loops }, loop));
  const seconds = Number(process.hrtime.bigint() - begun) / 1e9;
  if (copies !== 2 * count) throw new Error(`${copies} copies of ${count}`);
  return seconds;
}

async function clear({ factory }) {
  if (backend === 'postgres') {
    await factory._pool.query('TRUNCATE "_k_tbl_source", "_k_tbl_west", "_k_tbl_north"');
  } else {
    await factory._rediscl.flushall();
  }
}

async function main() {
  const opened = await open();
  for await (const line of createInterface({ input: process.stdin })) {
    await fill(opened.source, Number(line));
    console.log(await route(opened, Number(line)));
    await clear(opened);
  }
  await promisify(opened.factory.close.bind(opened.factory))();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
