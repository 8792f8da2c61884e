import time, asyncio
from tests.web.test_monitor_observer import *
def test_it(world):
    async def play(stage):
        stage.look(); await stage.until(stage.is_live)
        o=stage.observer; orig=o._happened
        t0=time.time()
        def h(*a): print(round(time.time()-t0,3),"event",a[:3]); orig(*a)
        o._happened=h
        for name in ("init","run","leave"):
            def wrap(name=name, f=getattr(stage.hub,name)):
                async def g(*a,**k):
                    b=time.time(); r=await f(*a,**k); print(round(time.time()-t0,3),name,a[0] if a else "",a[2:] ,r,round(time.time()-b,3)); return r
                setattr(stage.hub,name,g)
            wrap()
        ro=o._observe
        async def obs():
            b=time.time(); r=await ro(); print(round(time.time()-t0,3),"observe",r,round(time.time()-b,3)); return r
        o._observe=obs
        world.owner.connection.execute("UPDATE messages.auth SET mode = 'R'")
        print(round(time.time()-t0,3),"updated")
        await stage.until(lambda: stage.frames[-1].get("state",{}).get("missing_role"))
        print(round(time.time()-t0,3),"told")
    staged(world, play)
